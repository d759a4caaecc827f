"""What every engine has: tokenised prompts, scoring of completions, and the run's weights.

An engine generates the completions of a population (`evoalign_lib.engines`). The classes here know the prompts, turn
token ids into rewards, and hold the weights of the run in this process, whoever generates.
"""

import bisect
import hashlib
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from evoalign_lib import noise
from evoalign_lib._model_checks import check_padding, check_prompts
from evoalign_lib.precision import Weights, copy_to, layout_of, open_weights
from evoalign_lib.rewards import ARGUMENTS, RewardError, Rewards, Scored
from evoalign_lib.update_rules import Member


@dataclass
class Evaluation:
    """What a member did on the prompts of a step."""

    scored: Scored
    """rewards of its completions, (completions,): one per prompt, or several samples of each prompt in turn"""
    lengths: np.ndarray
    """(completions,) generated tokens, the end token included"""
    clipped: np.ndarray
    """(completions,) bool: no end token within the limit"""
    core_seconds: float
    """CPU time of the worker"""


@dataclass(frozen=True)
class Options:
    """How completions are decoded, beyond plain and to the end token; the defaults change nothing."""

    temperature: float = 1.0
    """of the samples of `Engine.evaluate`; the logits are divided by it"""
    top_k: int = 0
    """of the samples: only so many tokens of the largest probability; 0: all"""
    top_p: float = 1.0
    """of the samples: only the tokens that have this share of the probability, the largest first; 1: all"""
    stop_strings: tuple[str, ...] = ()
    """a completion ends with the token that completes one of these texts, which it includes"""
    generation_kwargs: Mapping[str, Any] | None = None
    """further settings of transformers' GenerationConfig, or of vLLM's SamplingParams"""


PLAIN = Options()


class Prompts:
    """Tokenised prompts, padded on the left to one width.

    Args:
        rows: the data set: mappings with "prompt" (a string or a list of messages) and further columns.
        tokenizer: the model's tokenizer.
        template: further arguments of apply_chat_template, for prompts that are messages.

    Raises:
        ValueError: no rows, rows without "prompt", rows with different columns, or a template for prompts that are
            strings.
        TypeError: no sequence of rows, or prompts of different types.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], tokenizer: Any, template: Mapping[str, Any] | None = None):
        if isinstance(rows, Mapping):
            raise TypeError(f"the data set is a mapping with the keys {sorted(rows)}: give one split, a list of rows.")
        rows = list(rows)
        if not rows:
            raise ValueError("the data set is empty: give at least one row with a 'prompt'.")
        for i, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise TypeError(f"row {i} of the data set is {row!r:.200}: give mappings with a 'prompt'.")
            if "prompt" not in row or row.keys() != rows[0].keys():
                columns = f"{sorted(row)}, row 0 has {sorted(rows[0])}"
                raise ValueError(
                    f"row {i} of the data set has the columns {columns}: give all the same, with 'prompt'."
                )
        if taken := sorted(rows[0].keys() & set(ARGUMENTS)):
            raise ValueError(f"the column {taken[0]!r} is an argument of reward functions: give it another name.")
        texts = self.prompts = [row["prompt"] for row in rows]
        self.conversational = not isinstance(texts[0], str)
        for i, prompt in enumerate(texts):
            if not isinstance(prompt, list if self.conversational else str):
                raise TypeError(f"the prompt of row {i} is {prompt!r:.200}: give strings everywhere, or message lists.")
        if self.conversational:
            how = {"tokenize": False, "add_generation_prompt": True} | dict(template or {})
            texts = [tokenizer.apply_chat_template(p, **how) for p in texts]
        elif template:
            raise ValueError(
                f"chat_template_kwargs={dict(template)!r} has no effect: the prompts are strings, which no template "
                "renders. Give lists of messages, or remove it."
            )
        self.columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        # a rendered chat template has its special tokens already; any other text gets those that the tokenizer adds
        rendered = self.conversational or bool(tokenizer.bos_token and texts[0].startswith(tokenizer.bos_token))
        ids = tokenizer(texts, add_special_tokens=not rendered, padding=False)["input_ids"]
        self.lengths = np.array([len(row) for row in ids])
        if not self.lengths.all():
            i = int(self.lengths.argmin())
            raise ValueError(f"the prompt of row {i} is empty after tokenisation: {self.prompts[i]!r}.")
        # what all prompts begin with; the shortest keeps its last token for itself
        same = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*ids, strict=False))
        self.prefix = np.array(ids[0][: min(len(list(same)), self.lengths.min() - 1)], dtype=np.int64)
        """(p,) tokens that all prompts begin with"""
        self.digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
        self.width = int(self.lengths.max())
        self.mask = (np.arange(self.width) >= self.width - self.lengths[:, None]).astype(np.int64)
        self.ids = np.full(self.mask.shape, tokenizer.pad_token_id, np.int64)
        self.ids[self.mask == 1] = np.concatenate(ids)

    def __len__(self) -> int:
        return len(self.prompts)

    def __eq__(self, other: object) -> bool:
        """Return whether these are the same prompts, in the same order, with the same columns."""
        if not isinstance(other, Prompts):
            return NotImplemented
        try:
            return (self.digest, self.prompts, self.columns) == (other.digest, other.prompts, other.columns)
        except ValueError:  # columns of arrays, which have no truth value
            return False

    __hash__ = object.__hash__


def until_end(ids: np.ndarray, eos_ids: Sequence[int]) -> list[list[int]]:
    """Return decoded ids, (rows, width), each row up to its first end token, which is included."""
    ends = np.isin(ids, eos_ids)
    lengths = np.where(ends.any(1), ends.argmax(1) + 1, ids.shape[1])
    return [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]


class Decoding:
    """Evaluates members and generates for rows of the prompts, in whichever process, given what decodes them.

    Args:
        tokenizer: the model's tokenizer.
        rewards: scores completions.
        prompts: name -> prompts (for example "train" and "eval").
        eos_ids: token ids that end a completion.
        max_completion_length: new tokens at most.
        options: how completions are decoded.
    """

    _noise: tuple[Member, float] | None = None  # on the weights themselves, where not this process makes it

    def __init__(
        self, tokenizer, rewards, prompts: Mapping[str, Prompts], eos_ids, max_completion_length: int, options=PLAIN
    ):
        self.tokenizer, self.rewards, self.prompts = tokenizer, rewards, dict(prompts)
        self.eos_ids, self.max_completion_length = list(eos_ids), max_completion_length
        self.options = options

    def until_end(self, ids: np.ndarray) -> list[list[int]]:
        """Return decoded ids, (rows, width), each row up to its end token or stop string, which is included."""
        return self.until_stop(until_end(ids, self.eos_ids))

    def until_stop(self, raw: list[list[int]]) -> list[list[int]]:
        """Return ids of completions, each up to the token that completes a stop string, if there is one."""
        if not self.options.stop_strings:
            return raw
        cut = list(raw)
        for i, stopped in enumerate(self.stopped(raw)):
            if stopped:  # a text that holds a stop string goes on holding it
                ends = range(1, len(raw[i]) + 1)
                cut[i] = raw[i][: 1 + bisect.bisect_left(ends, True, key=lambda n: self.stopped([raw[i][:n]])[0])]
        return cut

    def stopped(self, raw: list[list[int]]) -> list[bool]:
        """Return for ids of completions whether their texts hold a stop string."""
        return [any(stop in text for stop in self.options.stop_strings) for text, _ in self.completions(raw)]

    def just_stopped(self, raw: list[list[int]]) -> list[bool]:
        """Return the same for completions that had none before their last token."""
        # a token that is shown has a byte at least, so the string is within as many tokens; then the whole is asked
        tail = max(len(stop.encode()) for stop in self.options.stop_strings) + 1
        found = self.stopped([row[-tail:] for row in raw])
        return [hit and self.stopped([row])[0] for hit, row in zip(found, raw, strict=True)]

    def completions(self, raw: list[list[int]]) -> list[tuple[str, list[int]]]:
        """Return completions as texts without special tokens, each with its ids."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        # one call into the tokenizers library instead of a Python loop over rows
        decode = self.tokenizer.batch_decode if backend is None else backend.decode_batch
        texts = decode(raw, skip_special_tokens=True)
        return list(zip(texts, raw, strict=True))

    def scored(
        self, index: int, name: str, indices: np.ndarray, completions: list, trainer_state: Any, started: float
    ) -> Evaluation:
        """Score a member's completions of rows of the prompts.

        Args:
            index: of the member, for errors.
            name, indices: which prompts, one row per completion.
            completions: pairs of text and token ids.
            trainer_state: passed to the reward functions.
            started: CPU time of this process when the member began, seconds.
        """
        try:
            scored = score(self.rewards, self.prompts[name], indices, completions, trainer_state)
        except RewardError as error:
            raise RewardError(f"member {index}: {error}") from error
        lengths = np.array([len(raw) for _, raw in completions])
        clipped = np.array([raw[-1] not in self.eos_ids for _, raw in completions])
        if self.options.stop_strings:
            clipped &= ~np.array(self.stopped([raw for _, raw in completions]))
        return Evaluation(scored, lengths, clipped, time.process_time() - started)

    @contextmanager
    def _perturbed_elsewhere(self, key: int, sigma: float) -> Iterator[None]:
        """Do what `Engine.perturbed` does where whatever generates makes the noise."""
        self._noise = Member(int(key)), float(sigma)
        try:
            yield
        finally:
            self._noise = None

    def _numbers(self, key: int, rows: np.ndarray, sample: int) -> np.ndarray:
        """Return what draws a sample of each row, (rows, ...), the same for all members."""
        raise NotImplementedError

    def _seeded(self, name: str, rows: np.ndarray, seed: int, draw: int) -> np.ndarray:
        """Return what draws a sample of the weights themselves, (rows, ...)."""
        return self._numbers(seed, rows, draw)

    def _decode(self, name, rows, numbers, temperature, member=None) -> list[tuple[str, list[int]]]:
        """Return completions of rows of the prompts, (text, ids) each.

        Args:
            name: which prompts.
            rows: of them.
            numbers: what draws them; None: greedy decoding.
            temperature: of the samples.
            member: whose weights decode, and sigma; None: the weights themselves.
        """
        raise NotImplementedError

    def evaluate_member(
        self, index: int, member: Member, sigma: float, name, indices: np.ndarray, trainer_state=None, sampling=None
    ) -> Evaluation:
        """Evaluate one member in this process; index: its own, for errors; the rest as for `Engine.evaluate`."""
        started = time.process_time()
        rows, numbers = self._drawn(np.asarray(indices), sampling)
        completions = self._decode(name, rows, numbers, self.options.temperature, (member, sigma))
        return self.scored(index, name, rows, completions, trainer_state, started)

    def generate_rows(
        self, name: str, indices: np.ndarray, seed: int = 0, draw: int | None = None, temperature: float = 1.0
    ) -> list[tuple[str, list[int]]]:
        """Return completions of the weights themselves, (text, ids) each, in this process.

        Args:
            name: which prompts.
            indices: rows of them.
            seed: of the samples.
            draw: which sample of each prompt; None: greedy decoding.
            temperature: of the samples, above 0.
        """
        numbers = None if draw is None else self._seeded(name, indices, seed, draw)
        return self._decode(name, indices, numbers, temperature)

    def _drawn(self, rows: np.ndarray, sampling: tuple[int, int] | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the rows of a member's prompts, each once a sample, and what draws these; None for greedy."""
        if sampling is None:
            return rows, None
        key, samples = sampling
        numbers = np.stack([self._numbers(key, rows, sample) for sample in range(samples)], 1)
        return np.repeat(rows, samples), numbers.reshape(-1, *numbers.shape[2:])


class Engine(Decoding):
    """What every engine has: prompts, a model with its tokenizer, and the weights of the run in this process.

    Whoever generates, this process holds the weights of the run, too, and moves them with every update: their digest
    goes into the ledger, checkpoints and folders are written from them, and a generator elsewhere is checked against
    them.

    Args:
        model: a Hugging Face decoder-only model; its parameters are the weights at the start. What has no
            requires_grad stays (of a model that has it nowhere, which is only decoded, all are weights).
        tokenizer: its tokenizer, with a padding token.
        rewards: scores completions.
        prompts: name -> prompts (for example "train" and "eval").
        max_completion_length: new tokens at most.
        options: how completions are decoded.
        weights: of the run, if they exist already; then all below are theirs.
        **law: of `open_weights`: precision ("master", "kahan" or "inplace"; in the last two the model's parameters
            become views of the engine's weights), distribution and rank of the noise, anchor_decay, and threads of this
            process that share an update of its weights.

    Raises:
        ValueError: an unknown precision or distribution, an anchor_decay or rank that is refused, a model that is not
            supported (see `open_weights`), or tokens or prompts that it cannot read (`_model_checks`).
    """

    workers = 1
    """processes that evaluate; 1: this one; 0: none on this machine"""
    repairs: Mapping[str, int] = {}
    """how often something broke and was repaired so far, by name; the trainer logs what is not zero"""

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
        """Float32 master, (layout.size,). Raises AttributeError in the modes that keep none."""
        if self.weights.precision != "master":
            raise AttributeError(f"precision={self.weights.precision!r} keeps no master: use engine.weights.float32().")
        return self.weights.flat

    @property
    def plan(self) -> dict[str, Any]:
        """Batch plan of training, on which floating-point results depend."""
        raise NotImplementedError

    def evaluate(
        self, members: Sequence[Member], sigma: float, name: str, indices: np.ndarray, trainer_state=None, sampling=None
    ) -> list[Evaluation]:
        """Evaluate a population; every member decodes its prompts under one perturbation.

        Args:
            members: (members,) keys and signs.
            sigma: standard deviation of the perturbation, weight units.
            name: which prompts.
            indices: rows of them, (prompts,), the same for all members; or (members, prompts), each its own (with
                engine "local", and with adapters on vLLM).
            trainer_state: passed to the reward functions, pickled with every member where other processes score; its
                `reward_state`, if any, is what reward functions with a state take over first.
            sampling: None for greedy decoding; else the key of the random numbers, which all members share (see
                `noise.uniforms`), and the number of completions per prompt, drawn as `options` say.

        Returns:
            (members,) in the order of `members`.
        """
        raise NotImplementedError

    def generate(
        self, name: str, indices: np.ndarray | None = None, *, samples: int = 0, seed: int = 0, temperature: float = 1.0
    ) -> list[list[tuple[str, list[int]]]]:
        """Return completions of the weights themselves.

        Args:
            name: which prompts.
            indices: rows of them (default: all).
            samples: 0 for greedy decoding, else samples per prompt, with top_k and top_p of `options`.
            seed: of the samples; a row of the prompts gets the same numbers in any chunk and at any temperature.
            temperature: of the samples, above 0; the logits are divided by it.

        Returns:
            (max(1, samples)) lists of (prompts) pairs of text and token ids.

        Raises:
            ValueError: a temperature that is not a number above 0.
        """
        check_temperature(temperature)
        rows = np.arange(len(self.prompts[name])) if indices is None else np.asarray(indices)
        size, draws = max(1, self._at_once(len(rows))), list(range(samples)) if samples else [None]
        chunks = [rows[i : i + size] for i in range(0, len(rows), size)]
        done = iter(self._generate([(name, chunk, seed, draw, temperature) for draw in draws for chunk in chunks]))
        return [[pair for _ in chunks for pair in next(done)] for _ in draws]

    def _at_once(self, rows: int) -> int:
        """Return how many of these rows of the prompts `_generate` gets at once."""
        return rows

    def _generate(self, parts: Sequence[tuple[str, np.ndarray, int, int | None, float]]) -> Iterable[list]:
        """Return the completions of parts, each the arguments of `generate_rows`, in their order."""
        raise NotImplementedError

    @contextmanager
    def perturbed(self, key: int, sigma: float) -> Iterator[None]:
        """Let `generate` decode with noise on the weights while the context lasts; then they are back, bit for bit.

        Args:
            key: of the noise, 64 bits.
            sigma: its standard deviation, weight units.
        """
        centre, law = self.master.copy(), (self.weights.distribution, self.weights.rank)
        try:
            noise.perturb(self.master, centre, self.layout, key, sigma, 1, *law)
            yield
        finally:
            self.master[:] = centre

    def _weights_of(self, member: tuple[Member, float] | None) -> AbstractContextManager:
        """Give the flat weights of a member, with sigma, while the context lasts; None: the weights themselves."""
        if member is None:
            return nullcontext(self.weights.flat)
        (key, sign), sigma = member
        return self.weights.member(key, sigma, sign)

    def longest(self) -> int:
        """Return the most tokens that a prompt has with its completion."""
        return max(p.width for p in self.prompts.values()) + self.max_completion_length

    def add_prompts(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Do what `put_prompts` does, with the rows of a data set."""
        self.put_prompts(name, Prompts(rows, self.tokenizer))

    def put_prompts(self, name: str, prompts: Prompts) -> None:
        """Add a set of prompts for `generate`, or replace one, at any time.

        Processes that run already and would not see it end; the next call starts others.

        Raises:
            ValueError: prompts that the model cannot read.
        """
        check_prompts(self.model, name, prompts, self.max_completion_length)
        self.prompts[name] = prompts

    def update(self, keys: np.ndarray, coefficients: np.ndarray) -> None:
        """Move the weights: keys uint64 (members,), coefficients float32 (members,); see `Weights.update`."""
        self.weights.update(keys, coefficients)

    def follow(self, updates: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Let generators elsewhere catch up with weights that were loaded here.

        Args:
            updates: (keys, coefficients) of every update from the starting model to these weights.
        """

    def check(self) -> None:
        """Compare the weights of all generators with those of this process; repair or refuse."""

    def write_model(self) -> None:
        """Copy the weights into the model's parameters, in the model's dtype."""
        copy_to(self.model, self.layout, self.weights.flat)

    def close(self) -> None:
        """End what the engine has started."""


def score(
    rewards: Rewards, prompts: Prompts, indices: np.ndarray, completions: Sequence, trainer_state: Any = None
) -> Scored:
    """Score completions of rows of the prompts, as strings or messages, whichever the prompts are."""
    texts = as_given(prompts, completions)
    columns = {key: [values[i] for i in indices] for key, values in prompts.columns.items()}
    chosen = [prompts.prompts[i] for i in indices]
    return rewards(chosen, texts, [raw for _, raw in completions], columns, trainer_state)


def as_given(prompts: Prompts, completions: Sequence[tuple[str, list[int]]]) -> list[Any]:
    """Return completions, pairs of text and token ids, as reward functions get them: texts, or messages."""
    if prompts.conversational:
        return [[{"role": "assistant", "content": text}] for text, _ in completions]
    return [text for text, _ in completions]


def _eos_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return the end tokens of the model's configurations and of its tokenizer."""
    said = model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id
    ids = {int(i) for value in said if value is not None for i in np.atleast_1d(value)}
    if not ids:
        raise ValueError("neither the model nor the tokenizer declares an end token: set tokenizer.eos_token.")
    return sorted(ids)


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless this is a temperature to sample at, a finite number above 0."""
    if not 0 < temperature < np.inf:
        raise ValueError(f"temperature={temperature} must be above 0: greedy decoding is samples=0.")
