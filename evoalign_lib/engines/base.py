"""Base classes of the engines: tokenised prompts, scoring of completions, and the run's weights.

An engine generates the completions of a population (`evoalign_lib.engines`). The classes here hold the prompts, turn
token ids into rewards, and keep the run's weights in this process, wherever the completions are generated.
"""

import bisect
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from evoalign_lib import chats, noise
from evoalign_lib._model_checks import check_padding, check_prompts
from evoalign_lib.checks import require
from evoalign_lib.precision import Weights, copy_to, layout_of, open_weights
from evoalign_lib.rewards import ARGUMENTS, RewardError, Rewards, Scored
from evoalign_lib.update_rules import Member


@dataclass
class Evaluation:
    """A member's result on the prompts of a step."""

    scored: Scored
    """rewards of its completions, (completions,): one per prompt, or all samples of the first prompt, then the next"""
    lengths: np.ndarray
    """(completions,) generated tokens, including the end token"""
    clipped: np.ndarray
    """(completions,) bool: no end token within the limit"""
    core_seconds: float
    """CPU time of the worker, and of the process in which it calls reward functions that have a time limit"""
    written: int
    """hash of the completions' tokens, by which members that write the same are told"""


@dataclass(frozen=True)
class Options:
    """Decoding options; the defaults decode plainly, up to the end token."""

    temperature: float = 1.0
    """sampling temperature in `Engine.evaluate`; the logits are divided by it"""
    top_k: int = 0
    """sample from this many of the most probable tokens; 0: from all"""
    top_p: float = 1.0
    """sample from the most probable tokens that together have this share of the probability; 1: from all"""
    stop_strings: tuple[str, ...] = ()
    """a completion ends with the token that completes one of these strings, and includes the string"""
    generation_kwargs: Mapping[str, Any] | None = None
    """further settings of transformers' GenerationConfig, or of vLLM's SamplingParams"""


PLAIN = Options()


class Prompts:
    """Tokenised prompts, padded on the left to one width.

    Args:
        rows: the data set: mappings with "prompt" (a string or a list of messages) and further columns.
        tokenizer: the model's tokenizer.
        template: further arguments of apply_chat_template, for prompts that are messages (see `chats.opened`).

    Attributes:
        date: the date that the chat template stated instead of today's (`chats.DATE`); None: it did not ask for it.

    Raises:
        ValueError: no rows, rows without "prompt", rows with different columns, a template for prompts that are
            strings, messages that cannot be rendered, or a prompt without tokens or with an end token as the last.
        TypeError: rows that are not a sequence of mappings, or prompts of different types.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], tokenizer: Any, template: Mapping[str, Any] | None = None):
        if isinstance(rows, Mapping):
            raise TypeError(f"the data set is a mapping with the keys {sorted(rows)}: pass one split, a list of rows.")
        rows = list(rows)
        require(rows, "the data set is empty: pass at least one row with a 'prompt'.")
        for i, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise TypeError(f"row {i} of the data set is {row!r:.200}: pass mappings with a 'prompt'.")
            if "prompt" not in row or row.keys() != rows[0].keys():
                columns = f"{sorted(row)}, row 0 has {sorted(rows[0])}: give all rows the same, with 'prompt'."
                raise ValueError(f"row {i} of the data set has the columns {columns}")
        if taken := sorted(rows[0].keys() & set(ARGUMENTS)):
            raise ValueError(f"the column {taken[0]!r} is an argument of reward functions: rename the column.")
        if seen := [name for name in ("image", "images") if any(row.get(name) is not None for row in rows)]:
            raise ValueError(f"the column {seen[0]!r} holds images, which models here cannot read: remove it.")
        texts = self.prompts = [row["prompt"] for row in rows]
        self.conversational = not isinstance(texts[0], str)
        for i, prompt in enumerate(texts):
            if not isinstance(prompt, list if self.conversational else str):
                raise TypeError(f"the prompt of row {i} is {prompt!r:.200}: use strings in all rows, or message lists.")
        self.date: str | None = None
        if self.conversational:
            texts = self._rendered(tokenizer, dict(template or {}))
        elif template:
            what = f"chat_template_kwargs={dict(template)!r} has no effect: the prompts are strings, to which no"
            raise ValueError(f"{what} template applies. Pass lists of messages, or remove it.")
        self.columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        for i, text in enumerate(texts):
            if text != text.encode(errors="ignore").decode():
                raise ValueError(f"the prompt of row {i} has a lone surrogate, which is no text: {text!r:.200}.")
        # a rendered chat template has its special tokens already; to other texts the tokenizer adds its own
        bos = tokenizer.bos_token
        bare = [not (self.conversational or bos and text.startswith(bos)) for text in texts]
        encoded = {lacks: tokenizer(texts, add_special_tokens=lacks, padding=False)["input_ids"] for lacks in set(bare)}
        ids = [encoded[lacks][i] for i, lacks in enumerate(bare)]
        self.lengths = np.array([len(row) for row in ids])
        if not self.lengths.all():
            i = int(self.lengths.argmin())
            raise ValueError(f"the prompt of row {i} is empty after tokenisation: {self.prompts[i]!r}.")
        ended = [i for i, row in enumerate(ids) if row[-1] == tokenizer.eos_token_id != tokenizer.bos_token_id]
        if ended:  # in the token that begins texts, too, a prompt may end
            what = f"the prompt of row {ended[0]} ends in the end token {tokenizer.eos_token!r}"
            raise ValueError(f"{what}: remove it, or if the tokenizer adds it, set tokenizer.add_eos_token = False.")
        # the shared prefix leaves at least the last token of the shortest prompt out
        same = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*ids, strict=False))
        self.prefix = np.array(ids[0][: min(len(list(same)), self.lengths.min() - 1)], dtype=np.int64)
        """(p,) tokens that all prompts begin with"""
        self.digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
        self.width = int(self.lengths.max())
        self.mask = (np.arange(self.width) >= self.width - self.lengths[:, None]).astype(np.int64)
        self.ids = np.full(self.mask.shape, tokenizer.pad_token_id, np.int64)
        self.ids[self.mask == 1] = np.concatenate(ids)

    def _rendered(self, tokenizer: Any, template: dict[str, Any]) -> list[str]:
        """Return the prompts as texts, and note whether their template asked for the date."""
        if taken := sorted(template.keys() & chats.OWN):
            raise ValueError(f"chat_template_kwargs={template!r}: {taken[0]!r} is no setting of a template. Remove it.")

        def clock(form: str) -> str:
            self.date = chats.DATE.date().isoformat()
            return chats.DATE.strftime(form)

        texts = []
        for i, messages in enumerate(self.prompts):
            try:
                texts.append(chats.opened(tokenizer, messages, clock, **template))
            except Exception as error:  # of the template, too, which may raise anything
                what = f"the prompt of row {i} cannot be rendered ({type(error).__name__}: {error!s:.600})"
                raise ValueError(f"{what}. Correct the messages, the template or chat_template_kwargs.") from error
        return texts

    def __len__(self) -> int:
        return len(self.prompts)

    def __eq__(self, other: object) -> bool:
        """Return whether both hold the same prompts in the same order, with the same columns."""
        if not isinstance(other, Prompts):
            return NotImplemented
        try:
            return (self.digest, self.prompts, self.columns) == (other.digest, other.prompts, other.columns)
        except ValueError:  # columns that hold arrays, which have no truth value
            return False

    __hash__ = object.__hash__


def until_end(ids: np.ndarray, eos_ids: Sequence[int]) -> list[list[int]]:
    """Cut decoded ids, (rows, width), after the first end token of each row."""
    ends = np.isin(ids, eos_ids)
    lengths = np.where(ends.any(1), ends.argmax(1) + 1, ids.shape[1])
    return [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]


class Decoding:
    """Evaluates members and generates completions, in any process; subclasses say how tokens are decoded.

    Args:
        tokenizer: the model's tokenizer.
        rewards: scores completions.
        prompts: name -> prompts (for example "train" and "eval").
        eos_ids: token ids that end a completion.
        max_completion_length: maximum number of new tokens.
        options: how completions are decoded.
    """

    _noise: tuple[Member, float] | None = None  # on the run's own weights, if another process makes it

    def __init__(
        self, tokenizer, rewards, prompts: Mapping[str, Prompts], eos_ids, max_completion_length: int, options=PLAIN
    ):
        self.tokenizer, self.rewards, self.prompts = tokenizer, rewards, dict(prompts)
        self.eos_ids, self.max_completion_length = list(eos_ids), max_completion_length
        self.options = options

    def until_end(self, ids: np.ndarray) -> list[list[int]]:
        """Cut decoded ids, (rows, width), after the end token or stop string of each row."""
        return self.until_stop(until_end(ids, self.eos_ids))

    def until_stop(self, raw: list[list[int]]) -> list[list[int]]:
        """Cut completions, as token ids, after the token that completes a stop string, if any."""
        if not self.options.stop_strings:
            return raw
        cut = list(raw)
        for i, stopped in enumerate(self.stopped(raw)):
            if stopped:  # once a text holds a stop string, every longer one does, so bisection finds the first
                ends = range(1, len(raw[i]) + 1)
                cut[i] = raw[i][: 1 + bisect.bisect_left(ends, True, key=lambda n: self.stopped([raw[i][:n]])[0])]
        return cut

    def stopped(self, raw: list[list[int]]) -> list[bool]:
        """Return whether the texts of completions, token ids, have a stop string, with or without special tokens."""
        stops, texts = self.options.stop_strings, [self._texts(raw, skip_special_tokens=False)]
        whole = "\n".join(texts[0])
        if any(str(token) in whole for token in self.tokenizer.added_tokens_decoder.values()):
            texts.append(self._texts(raw))
        return [any(stop in text for text in each for stop in stops) for each in zip(*texts, strict=True)]

    def just_stopped(self, raw: list[list[int]]) -> list[bool]:
        """Return the same for completions that had no stop string before their last token."""
        # every token with text has at least one byte, so the string's length in bytes bounds the tail that can hold it;
        # a hit in the tail is confirmed on the whole completion
        tail = max(len(stop.encode()) for stop in self.options.stop_strings) + 1
        found = self.stopped([row[-tail:] for row in raw])
        return [hit and self.stopped([row])[0] for hit, row in zip(found, raw, strict=True)]

    def completions(self, raw: list[list[int]]) -> list[tuple[str, list[int]]]:
        """Return the texts of completions without special tokens, each paired with its ids."""
        return list(zip(self._texts(raw), raw, strict=True))

    def _texts(self, raw: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        # one call into the tokenizers library instead of a Python loop over rows
        decode = self.tokenizer.batch_decode if backend is None else backend.decode_batch
        return decode(raw, skip_special_tokens=skip_special_tokens)

    def scored(
        self, index: int, name: str, indices: np.ndarray, completions: list, trainer_state: Any, started: float
    ) -> Evaluation:
        """Score a member's completions.

        Args:
            index: the member's index, for errors.
            name, indices: set of prompts and its rows, one per completion.
            completions: pairs of text and token ids.
            trainer_state: passed to the reward functions.
            started: CPU time of this process when it began on the member, seconds.
        """
        try:
            scored = score(self.rewards, self.prompts[name], indices, completions, trainer_state)
        except RewardError as error:
            raise RewardError(f"member {index}: {error}") from error
        lengths = np.array([len(raw) for _, raw in completions])
        clipped = np.array([raw[-1] not in self.eos_ids for _, raw in completions])
        if self.options.stop_strings:
            clipped &= ~np.array(self.stopped([raw for _, raw in completions]))
        written = hash(tuple(tuple(raw) for _, raw in completions))
        return Evaluation(scored, lengths, clipped, time.process_time() - started + scored.seconds, written)

    @contextmanager
    def _perturbed_elsewhere(self, key: int, sigma: float) -> Iterator[None]:
        """Do what `Engine.perturbed` does for engines whose generator makes the noise itself."""
        self._noise = Member(int(key)), float(sigma)
        try:
            yield
        finally:
            self._noise = None

    def _numbers(self, key: int, rows: np.ndarray, sample: int) -> np.ndarray:
        """Return the random numbers (or seeds) that draw a sample of each row, (rows, ...), shared by all members."""
        raise NotImplementedError

    def _seeded(self, name: str, rows: np.ndarray, seed: int, draw: int) -> np.ndarray:
        """Return the random numbers (or seeds) for a sample with the run's own weights, (rows, ...)."""
        return self._numbers(seed, rows, draw)

    def _decode(self, name, rows, numbers, temperature, member=None) -> list[tuple[str, list[int]]]:
        """Return completions, (text, ids) each.

        Args:
            name: set of prompts.
            rows: its rows to complete.
            numbers: what `_numbers` or `_seeded` returned for the rows; None: greedy decoding.
            temperature: sampling temperature.
            member: the member to decode with, and sigma; None: the run's own weights.
        """
        raise NotImplementedError

    def evaluate_member(
        self, index: int, member: Member, sigma: float, name, indices: np.ndarray, trainer_state=None, sampling=None
    ) -> Evaluation:
        """Evaluate one member in this process; index: the member's, for errors; the rest as for `Engine.evaluate`."""
        started = time.process_time()
        rows, numbers = self._drawn(np.asarray(indices), sampling)
        completions = self._decode(name, rows, numbers, self.options.temperature, (member, sigma))
        return self.scored(index, name, rows, completions, trainer_state, started)

    def generate_rows(
        self, name: str, indices: np.ndarray, seed: int = 0, draw: int | None = None, temperature: float = 1.0
    ) -> list[tuple[str, list[int]]]:
        """Generate completions with the run's own weights in this process; return (text, ids) of each.

        Args:
            name: set of prompts.
            indices: its rows to complete.
            seed: seed of the samples.
            draw: which sample of each prompt; None: greedy decoding.
            temperature: sampling temperature, above 0.
        """
        numbers = None if draw is None else self._seeded(name, indices, seed, draw)
        return self._decode(name, indices, numbers, temperature)

    def _drawn(self, rows: np.ndarray, sampling: tuple[int, int] | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the rows of a member's prompts, repeated for each sample, and their random numbers (None: greedy)."""
        if sampling is None:
            return rows, None
        key, samples = sampling
        numbers = np.stack([self._numbers(key, rows, sample) for sample in range(samples)], 1)
        return np.repeat(rows, samples), numbers.reshape(-1, *numbers.shape[2:])


class Engine(Decoding):
    """Base class of the engines: prompts, a model with its tokenizer, and the run's weights in this process.

    Wherever completions are generated, this process holds the run's weights and applies every update to them: their
    digest goes into the ledger, checkpoints and model folders are written from them, and generators elsewhere are
    checked against them.

    Args:
        model: a Hugging Face decoder-only model whose parameters are the starting weights. Parameters without
            requires_grad stay fixed (if none has it, the model is only decoded with, and all count as weights).
        tokenizer: its tokenizer, with a padding token.
        rewards: scores completions.
        prompts: name -> prompts (for example "train" and "eval").
        max_completion_length: maximum number of new tokens.
        options: how completions are decoded.
        weights: the run's weights if they exist already; `law` is then ignored.
        **law: arguments of `open_weights`: precision ("master", "kahan" or "inplace"; in the last two the model's
            parameters become views of the engine's weights), distribution and rank of the noise, anchor_decay, and the
            threads of this process that share an update.

    Raises:
        ValueError: an unknown precision or distribution, an anchor_decay or rank that is refused, a model that is not
            supported (see `open_weights`), or tokens or prompts that it cannot read (`_model_checks`).
    """

    workers = 1
    """processes that evaluate; 1: this one; 0: none on this machine"""
    repairs: Mapping[str, int] = {}
    """number of repairs so far, by kind of failure; the trainer logs those above zero"""

    def __init__(
        self, model, tokenizer, rewards, prompts, *, max_completion_length: int, options=PLAIN, weights=None, **law: Any
    ):
        super().__init__(tokenizer, rewards, prompts, _eos_ids(model, tokenizer), max_completion_length, options)
        self.model = model
        check_padding(model, tokenizer)
        for name, each in prompts.items():
            check_prompts(model, name, each, max_completion_length)
        self.layout = layout_of(model)
        self.weights: Weights = weights or open_weights(model, self.layout, bind=True, **law)

    @property
    def master(self) -> np.ndarray:
        """Float32 master, (layout.size,). Raises AttributeError in the precision modes that keep none."""
        if self.weights.precision != "master":
            raise AttributeError(f"precision={self.weights.precision!r} keeps no master: use engine.weights.float32().")
        return self.weights.flat

    @property
    def plan(self) -> dict[str, Any]:
        """The batch plan of training; floating-point results depend on it."""
        raise NotImplementedError

    def evaluate(
        self, members: Sequence[Member], sigma: float, name: str, indices: np.ndarray, trainer_state=None, sampling=None
    ) -> list[Evaluation]:
        """Evaluate a population; each member decodes its prompts under its own perturbation.

        Args:
            members: (members,) keys and signs.
            sigma: standard deviation of the perturbation, weight units.
            name: set of prompts.
            indices: its rows, (prompts,), the same for all members; or (members, prompts), each member's own (with
                engine "local", and with adapters on vLLM).
            trainer_state: passed to the reward functions, and pickled with every member if other processes score;
                stateful reward functions first take over its `reward_state`, if any.
            sampling: None for greedy decoding; else the key of the random numbers, which all members share (see
                `noise.uniforms`), and the number of completions per prompt, drawn according to `options`.

        Returns:
            (members,) in the order of `members`.
        """
        raise NotImplementedError

    def generate(
        self, name: str, indices: np.ndarray | None = None, *, samples: int = 0, seed: int = 0, temperature: float = 1.0
    ) -> list[list[tuple[str, list[int]]]]:
        """Generate completions with the run's own weights.

        Args:
            name: set of prompts.
            indices: its rows to complete (default: all).
            samples: 0 for greedy decoding, else samples per prompt, with top_k and top_p of `options`.
            seed: seed of the samples; a row of the prompts gets the same numbers in any chunk and at any temperature.
            temperature: sampling temperature, above 0; the logits are divided by it.

        Returns:
            (max(1, samples)) lists of (prompts) pairs of text and token ids.

        Raises:
            ValueError: a temperature that is not a finite number above 0.
        """
        check_temperature(temperature)
        rows = np.arange(len(self.prompts[name])) if indices is None else np.asarray(indices)
        size, draws = max(1, self._at_once(len(rows))), list(range(samples)) if samples else [None]
        chunks = [rows[i : i + size] for i in range(0, len(rows), size)]
        done = iter(self._generate([(name, chunk, seed, draw, temperature) for draw in draws for chunk in chunks]))
        return [[pair for _ in chunks for pair in next(done)] for _ in draws]

    def _at_once(self, rows: int) -> int:
        """Return how many of this number of rows to pass to `_generate` in one part."""
        return rows

    def _generate(self, parts: Sequence[tuple[str, np.ndarray, int, int | None, float]]) -> Iterable[list]:
        """Return the completions of each part in order; a part holds the arguments of `generate_rows`."""
        raise NotImplementedError

    @contextmanager
    def perturbed(self, key: int, sigma: float) -> Iterator[None]:
        """Make `generate` decode with noise on the weights inside the context; restore them bit for bit afterwards.

        Args:
            key: key of the noise, 64 bits.
            sigma: standard deviation of the noise, weight units.
        """
        centre, law = self.master.copy(), (self.weights.distribution, self.weights.rank)
        try:
            noise.perturb(self.master, centre, self.layout, key, sigma, 1, *law)
            yield
        finally:
            self.master[:] = centre

    def _weights_of(self, member: tuple[Member, float] | None) -> AbstractContextManager:
        """Yield the flat weights of a (member, sigma) inside the context; None: the run's own weights."""
        if member is None:
            return nullcontext(self.weights.flat)
        (key, sign), sigma = member
        return self.weights.member(key, sigma, sign)

    def longest(self) -> int:
        """Return the largest possible number of tokens of a prompt and its completion."""
        return max(p.width for p in self.prompts.values()) + self.max_completion_length

    def add_prompts(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Tokenise the rows of a data set and pass them to `put_prompts`."""
        self.put_prompts(name, Prompts(rows, self.tokenizer))

    def put_prompts(self, name: str, prompts: Prompts) -> None:
        """Add or replace a set of prompts for `generate`, at any time.

        Running processes that would not see the new prompts are ended; the next call starts new ones.

        Raises:
            ValueError: prompts that the model cannot read.
        """
        check_prompts(self.model, name, prompts, self.max_completion_length)
        self.prompts[name] = prompts

    def update(self, keys: np.ndarray, coefficients: np.ndarray) -> None:
        """Update the weights: keys uint64 (members,), coefficients float32 (members,); see `Weights.update`."""
        self.weights.update(keys, coefficients)

    def follow(self, updates: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Bring generators elsewhere up to the weights that were loaded here.

        Args:
            updates: (keys, coefficients) of every update from the starting model to these weights.
        """

    def check(self) -> None:
        """Compare the weights of all generators with those of this process; repair a difference or raise."""

    def begin_digest(self) -> Callable[[], str]:
        """Return a function that returns the digest of the present weights; call it before they change."""
        digest = self.weights.digest()
        return lambda: digest

    def write_model(self) -> None:
        """Copy the weights into the model's parameters, in the model's dtype."""
        copy_to(self.model, self.layout, self.weights.flat)

    def close(self) -> None:
        """End the processes and generators that the engine has started."""


def score(
    rewards: Rewards, prompts: Prompts, indices: np.ndarray, completions: Sequence, trainer_state: Any = None
) -> Scored:
    """Score completions, passed to the reward functions as strings or as messages, as the prompts are."""
    texts = as_given(prompts, completions)
    columns = {key: [values[i] for i in indices] for key, values in prompts.columns.items()}
    chosen = [prompts.prompts[i] for i in indices]
    return rewards(chosen, texts, [raw for _, raw in completions], columns, trainer_state)


def as_given(prompts: Prompts, completions: Sequence[tuple[str, list[int]]]) -> list[Any]:
    """Convert completions, pairs of text and token ids, into what reward functions get: texts, or messages."""
    if prompts.conversational:
        return [[{"role": "assistant", "content": text}] for text, _ in completions]
    return [text for text, _ in completions]


def _eos_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return the end tokens that the model's configurations and the tokenizer declare."""
    said = model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id
    ids = {int(i) for value in said if value is not None for i in np.atleast_1d(value)}
    require(ids, "neither the model nor the tokenizer declares an end token: set tokenizer.eos_token.")
    return sorted(ids)


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless the temperature can be sampled at: a finite number above 0."""
    require(0 < temperature < np.inf, f"temperature={temperature} must be above 0. For greedy decoding set samples=0.")
