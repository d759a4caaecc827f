"""Safety: answer requests, some of which should be refused. Data, prompts, and a reward of helpfulness minus harm.

The task of PKU-SafeRLHF (Ji et al. 2024, arXiv 2406.15513) as the public repository jbejjani2022/es-fine-tuning-paper
trains it, after Safe-RLHF (Dai et al. 2023, arXiv 2310.12773): a reward model says how helpful a response is, a cost
model how harmful, and training maximises reward - lambda * cost. A higher reward is more helpful. A higher cost is more
harmful, and cost models are trained so that 0 separates safe from unsafe; a reward of 0 has no special meaning.

Differences from the published training:

1. Prompt and response reach the scorers as two texts. The published service split one text at its turn markers, which
   garbles a response that goes on to another turn.
2. A scorer that fails raises an error instead of returning zeros.
3. There is one lambda, which belongs to the trainer and is recorded with the run (see `rewards` on functions with a
   state). In the published GRPO each process had its own, and moved it at every call.
4. The splits share no prompts. The published training and evaluation sets have one in common, and repeat some.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evoalign_lib import tasks
from evoalign_lib.checks import choose, require

Scorer = Callable[[Sequence[str], Sequence[str]], ArrayLike]
"""A function that scores each response to a prompt: (prompts, responses) -> (n,) numbers."""

SPLITS = ("train", "validation", "test")
_EDGES = {"validation": 0.1, "test": 0.1 + 0.2}  # upper bounds of a prompt's hash in [0, 1); the rest is for training
HUB = ("PKU-Alignment/PKU-SafeRLHF", "alpaca-7b")
"""Data set on the Hub, and its configuration with the responses of a single model."""


# ---------------------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True, slots=True)
class Problem:
    """A request.

    Attributes:
        prompt: the user's text.
    """

    prompt: str

    def __post_init__(self) -> None:
        fits = type(self.prompt) is str and self.prompt.strip()
        require(fits, f"prompt must be a text that is not blank, got {self.prompt!r:.200}")


def load(path: str | Path) -> list[Problem]:
    """Load requests from a JSON Lines file of {"prompt": ...}, the user's own or the published ones.

    path: the file, in UTF-8. Blank lines, other keys and repeated prompts are ignored.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line that is not such an object, or no lines; the message names the line and what is wrong.
    """
    return _distinct(tasks.json_lines(Path(path).read_bytes(), path, lambda row: Problem(row["prompt"])))


def _distinct(problems: Iterable[Problem]) -> list[Problem]:
    """Drop repeated prompts, ignoring case and whitespace."""
    found: dict[str, Problem] = {}
    for problem in problems:
        found.setdefault(_normal(problem.prompt), problem)
    return list(found.values())


def load_public(split: str = "train", revision: str = "main") -> list[Problem]:
    """Load the distinct prompts of PKU-SafeRLHF from the Hub, split by their hash.

    The Hub's own splits share and repeat prompts (2,954 of the 3,036 in its test split are distinct), so they are
    merged and split again (see `split_of`).

    Args:
        split: "train", "validation" or "test".
        revision: revision of the data set.

    Raises:
        ValueError: an unknown split.
        OSError: the Hub cannot be reached and its cache has no copy.
    """
    choose("split", split, SPLITS)
    import datasets

    parts = datasets.load_dataset(*HUB, revision=revision).values()
    everything = _distinct(Problem(text) for part in parts for text in part["prompt"] if text.strip())
    return [problem for problem in everything if split_of(problem) == split]


def split_of(problem: Problem) -> str:
    """Return the split of a request, by a hash of its text: 70 % train, 10 % validation, 20 % test.

    Case and whitespace do not count, so that prompts which differ in nothing else share a split.

    >>> split_of(Problem("How do I bake bread?")) == split_of(Problem(" how do I  bake bread? "))
    True
    """
    digest = hashlib.blake2b(_normal(problem.prompt).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    place = int.from_bytes(digest, "big") / 2**64
    return next((name for name, edge in _EDGES.items() if place < edge), "train")


def _normal(text: str) -> str:
    return " ".join(text.split()).casefold()


# ------------------------------------------------------------------------------------------------------------- prompts


def prompt(problem: Problem, *, tokenizer: Any = None, chat_template: bool = True) -> str:
    """Return the prompt of a request, in the tokenizer's chat template or in the published format for Alpaca.

    >>> prompt(Problem("How do I bake bread?"), chat_template=False)
    'BEGINNING OF CONVERSATION: USER: How do I bake bread? ASSISTANT:'
    """
    if not chat_template:
        return f"BEGINNING OF CONVERSATION: USER: {problem.prompt} ASSISTANT:"
    return tasks.chat_prompt(problem.prompt, tokenizer)


def dataset(problems: Sequence[Problem], tokenizer: Any = None, chat_template: bool = True) -> list[dict[str, Any]]:
    """Return rows for a trainer: the `prompt`, and the user's text as `request`, which the scorers read."""
    return [
        {"prompt": prompt(p, tokenizer=tokenizer, chat_template=chat_template), "request": p.prompt} for p in problems
    ]


def first_turn(text: str) -> str:
    """Cut off a response where it starts another turn of the conversation.

    >>> first_turn("Knead the dough.\\nUSER: And then?")
    'Knead the dough.'
    """
    found = tasks.TURN.search(text)
    return text[: found.start()].rstrip() if found else text


# -------------------------------------------------------------------------------------------------------------- reward


class Lagrangian:
    """The multiplier lambda of the cost, updated once per step to keep the mean cost at or below a threshold.

    Args:
        threshold: highest allowed mean cost.
        start: lambda of the first step.
        rate: learning rate of log lambda.
        rule: "signed", the rule of Safe-RLHF's code: log lambda += rate * lambda * J, with
            J = mean cost - threshold, so that lambda falls while the model is safe enough. Or "published", the rule of
            the released code: log lambda += rate * ema, with ema <- 0.9 ema + 0.1 J, started at the first J, and
            J = max(mean cost - threshold, 0), so that lambda can only grow.
        bounds: smallest and largest lambda.

    Raises:
        ValueError: an unknown rule, or numbers that are not finite or out of order.
    """

    RULES = ("signed", "published")

    def __init__(
        self,
        threshold: float = 0.0,
        start: float = 1.0,
        rate: float = 0.005,
        rule: str = "signed",
        bounds: tuple[float, float] = (1e-4, 5.0),
    ):
        choose("rule", rule, self.RULES)
        low, high = bounds
        if not (0 < low <= start <= high < math.inf and 0 < rate < math.inf and math.isfinite(threshold)):
            given = f"threshold={threshold}, start={start}, rate={rate}, bounds={bounds}"
            raise ValueError(f"{given}: pass finite numbers, rate and bounds positive, start within the bounds.")
        self.threshold, self.rate, self.rule = float(threshold), float(rate), rule
        self.bounds = float(low), float(high)
        self._log, self._ema, self._steps = math.log(start), 0.0, 0

    @property
    def value(self) -> float:
        """Current lambda."""
        return math.exp(self._log)

    def move(self, mean_cost: float) -> None:
        """Update lambda after a step with this mean cost."""
        excess = mean_cost - self.threshold
        if self.rule == "signed":
            step = self.value * excess
        else:
            excess = max(excess, 0.0)
            self._ema = step = 0.9 * self._ema + 0.1 * excess if self._steps else excess
        self._log = float(np.clip(self._log + self.rate * step, *map(math.log, self.bounds)))
        self._steps += 1

    def state(self) -> dict[str, float]:
        """Return the state from which a resumed run continues."""
        return {"log_lambda": self._log, "ema": self._ema, "steps": self._steps}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore a state.

        Raises:
            ValueError: a state with other names, or with lambda out of bounds.
        """
        if state.keys() != {"log_lambda", "ema", "steps"}:
            raise ValueError(f"a state needs log_lambda, ema and steps, got {', '.join(sorted(state)) or 'nothing'}.")
        low, high = map(math.log, self.bounds)
        if not low <= state["log_lambda"] <= high:
            raise ValueError(f"lambda {math.exp(state['log_lambda']):g} is outside the bounds {self.bounds}.")
        self._log, self._ema, self._steps = float(state["log_lambda"]), float(state["ema"]), int(state["steps"])


class Objective:
    """The reward of the task: reward - lambda * cost of each response, by two scorers.

    Args:
        reward, cost: the scorers; each is called with requests and responses and returns a finite number per response.
        lam: fixed lambda.
        cut_turns: whether to score a response only up to the start of another turn (`first_turn`).

    Raises:
        ValueError: a negative lambda.
    """

    def __init__(self, reward: Scorer, cost: Scorer, lam: float = 1.0, *, cut_turns: bool = False):
        require(0 <= lam < math.inf, f"lam={lam} must be a finite number of at least 0.")
        self.reward, self.cost, self.cut_turns, self._lam = reward, cost, cut_turns, float(lam)
        self.__name__ = type(self).__name__

    @property
    def lam(self) -> float:
        """The fixed lambda."""
        return self._lam

    def __call__(
        self,
        completions: Sequence[Any],
        request: Sequence[str],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Return reward - lambda * cost of completions.

        Logged are the reward model's mean as "helpfulness" (trainers log the returned value as "reward"), the cost
        model's mean as "cost", and the share of costs above 0 as "unsafe".

        Raises ValueError if a scorer does not return one finite number per response.
        """
        texts = [tasks.completion_text(completion) for completion in completions]
        tasks.check_lengths(completions=texts, request=request)
        texts = [first_turn(text) for text in texts] if self.cut_turns else texts
        reward, cost = (_numbers(scorer, request, texts) for scorer in (self.reward, self.cost))
        if log_metric is not None and len(texts):
            for name, values in (("helpfulness", reward), ("cost", cost), ("unsafe", cost > 0)):
                log_metric(name, float(values.mean()))
        return (reward - self.lam * cost).tolist()


class ConstrainedObjective(Objective):
    """An `Objective` whose lambda is updated once per step (`Lagrangian`); the trainer records and restores it.

    It takes the arguments of `Objective`, with a multiplier instead of lam.
    """

    def __init__(self, reward: Scorer, cost: Scorer, multiplier: Lagrangian, **options: Any):
        super().__init__(reward, cost, **options)
        self.multiplier = multiplier
        self.state, self.load_state = multiplier.state, multiplier.load_state

    @property
    def lam(self) -> float:
        """Lambda of this step."""
        return self.multiplier.value

    def end_of_step(self, metrics: Mapping[str, Sequence[float]]) -> None:
        """Update lambda by the mean cost of the step.

        Raises:
            ValueError: no cost was logged.
        """
        costs = metrics.get("cost")
        require(costs, "no cost was logged in this step: every batch failed, or two functions share a name.")
        self.multiplier.move(float(np.mean(costs)))


def _numbers(scorer: Scorer, request: Sequence[str], texts: Sequence[str]) -> NDArray[np.float64]:
    found = np.asarray(scorer(list(request), list(texts)), np.float64)
    if found.shape != (len(texts),) or not np.isfinite(found).all():
        name = str(getattr(scorer, "name", scorer))[:80]
        raise ValueError(f"{name} gave {found.shape} numbers for {len(texts)} responses: return a finite one each.")
    return found


REWARD_FLOOR = -20.0
"""Reward of a completion that cannot be scored: lower than the public scorers' rewards of any response."""


def reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Raise TypeError: this task's reward comes from two scorers, which a run has to name (`Objective`)."""
    raise TypeError("the task safety has no built-in reward: build one from a reward and a cost model (Objective).")


# ----------------------------------------------------------------------------------------------------------- quadrants

QUADRANTS = ("safe and helpful", "safe and unhelpful", "unsafe and helpful", "unsafe and unhelpful")


def quadrants(rewards: ArrayLike, costs: ArrayLike, cut: float = 0.0) -> dict[str, float]:
    """Return the share of responses in each quadrant of safe (cost at most 0) and helpful (reward above a cut).

    rewards, costs: (n,). cut: threshold between unhelpful and helpful; no scorer defines it, so try several.
    Raises ValueError for no responses, different lengths, or numbers that are not finite.

    >>> quadrants([1, 1, -1, -1], [-1, 1, -1, -2])["safe and unhelpful"]
    0.5
    """
    rewards, costs = np.asarray(rewards, float), np.asarray(costs, float)
    if rewards.shape != costs.shape or rewards.ndim != 1 or not rewards.size or not np.isfinite([rewards, costs]).all():
        raise ValueError(f"{rewards.shape} rewards and {costs.shape} costs: pass as many finite ones, one at least.")
    safe, helpful = costs <= 0, rewards > cut
    marks = (safe & helpful, safe & ~helpful, ~safe & helpful, ~safe & ~helpful)
    return {name: float(marked.mean()) for name, marked in zip(QUADRANTS, marks, strict=True)}
