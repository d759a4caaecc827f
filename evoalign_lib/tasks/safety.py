"""Safety: answer requests, some of which should be refused. Data, prompts, and a reward of helpfulness less harm.

The task of PKU-SafeRLHF (Ji et al. 2024, arXiv 2406.15513) as the public repository jbejjani2022/es-fine-tuning-paper
trains it, after Safe-RLHF (Dai et al. 2023, arXiv 2310.12773): a reward model says how helpful a response is, a cost
model how harmful, and what is maximised is reward - lambda * cost. Signs: more reward is more helpful; more cost is
more harmful, and 0 is the border that cost models are trained to have. A reward of 0 is no border of anything.

Unlike the published training:

1. Prompt and response reach the scorers as two texts. The published service split one text at its turn markers, which
   garbles a response that goes on to another turn.
2. A scorer that fails raises; it gives no zeros.
3. One lambda belongs to the trainer and is recorded with the run (`rewards`, functions with a state). In the published
   GRPO every process moved one of its own at every call.
4. The splits share no prompt: the published training and evaluation sets share one, and repeat some.
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
from evoalign_lib.checks import choose

Scorer = Callable[[Sequence[str], Sequence[str]], ArrayLike]
"""What gives each response to a prompt a number: (prompts, responses) -> (n,)."""

SPLITS = ("train", "validation", "test")
_EDGES = {"validation": 0.1, "test": 0.1 + 0.2}  # where the hash of a prompt falls; the rest is for training
HUB = ("PKU-Alignment/PKU-SafeRLHF", "alpaca-7b")
"""Data set on the Hub, and its configuration whose responses are those of one model."""


# ---------------------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True, slots=True)
class Problem:
    """A request.

    Attributes:
        prompt: as the user writes it.
    """

    prompt: str

    def __post_init__(self) -> None:
        if type(self.prompt) is not str or not self.prompt.strip():
            raise ValueError(f"prompt must be a text that is not blank, got {self.prompt!r:.200}")


def load(path: str | Path) -> list[Problem]:
    """Load requests from a file of JSON lines: {"prompt": ...}, the user's own or the published ones.

    path: the file, UTF-8. Blank lines are skipped, other keys not read. A prompt that occurs again is left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line that is no such object, or no line at all; the message names the line and what is wrong.
    """
    return _distinct(tasks.json_lines(Path(path).read_bytes(), path, lambda row: Problem(row["prompt"])))


def _distinct(problems: Iterable[Problem]) -> list[Problem]:
    """Return the first of each prompt, whose case and blanks do not count."""
    found: dict[str, Problem] = {}
    for problem in problems:
        found.setdefault(_normal(problem.prompt), problem)
    return list(found.values())


def load_public(split: str = "train", revision: str = "main") -> list[Problem]:
    """Load the prompts of PKU-SafeRLHF from the Hub: every prompt once, in the split that its hash decides.

    The Hub's own splits share prompts (2,954 are distinct among the 3,036 of its test split): both are put together and
    split anew (see `split_of`).

    Args:
        split: "train", "validation" or "test".
        revision: of the data set.

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

    Case and blanks do not count, so that no split has a prompt of another in other clothes.

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
    """Return the prompt of a request: by the tokenizer's chat template, or as published for Alpaca.

    >>> prompt(Problem("How do I bake bread?"), chat_template=False)
    'BEGINNING OF CONVERSATION: USER: How do I bake bread? ASSISTANT:'
    """
    if not chat_template:
        return f"BEGINNING OF CONVERSATION: USER: {problem.prompt} ASSISTANT:"
    return tasks.chat_prompt(problem.prompt, tokenizer)


def dataset(problems: Sequence[Problem], tokenizer: Any = None, chat_template: bool = True) -> list[dict[str, Any]]:
    """Return rows for a trainer: the prompt, and as `request` what the user wrote, which the scorers read."""
    return [
        {"prompt": prompt(p, tokenizer=tokenizer, chat_template=chat_template), "request": p.prompt} for p in problems
    ]


def first_turn(text: str) -> str:
    """Return a response up to where it goes on to another turn of the conversation.

    >>> first_turn("Knead the dough.\\nUSER: And then?")
    'Knead the dough.'
    """
    found = tasks.TURN.search(text)
    return text[: found.start()].rstrip() if found else text


# -------------------------------------------------------------------------------------------------------------- reward


class Lagrangian:
    """The multiplier of the cost, which moves once a step so that the mean cost stays at or below a threshold.

    Args:
        threshold: mean cost that is allowed.
        start: lambda of the first step.
        rate: of the change of log lambda.
        rule: "signed", that of Safe-RLHF's code: log lambda += rate * lambda * J, with
            J = mean cost - threshold, which falls where the model is safe enough. Or "published", that of the released
            code: J = max(mean cost - threshold, 0), smoothed by ema <- 0.9 ema + 0.1 J from the first J on, log lambda
            += rate * ema: it can only grow.
        bounds: least and largest lambda.

    Raises:
        ValueError: a rule that is none of these, or numbers that are not finite or not in order.
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
            raise ValueError(f"{given}: give finite numbers, rate and bounds positive, start within the bounds.")
        self.threshold, self.rate, self.rule = float(threshold), float(rate), rule
        self.bounds = float(low), float(high)
        self._log, self._ema, self._steps = math.log(start), 0.0, 0

    @property
    def value(self) -> float:
        """Lambda."""
        return math.exp(self._log)

    def move(self, mean_cost: float) -> None:
        """Move lambda after a step with this mean cost."""
        excess = mean_cost - self.threshold
        if self.rule == "signed":
            step = self.value * excess
        else:
            excess = max(excess, 0.0)
            self._ema = step = 0.9 * self._ema + 0.1 * excess if self._steps else excess
        self._log = float(np.clip(self._log + self.rate * step, *map(math.log, self.bounds)))
        self._steps += 1

    def state(self) -> dict[str, float]:
        """Return what a resumed run goes on with."""
        return {"log_lambda": self._log, "ema": self._ema, "steps": self._steps}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Take over a state.

        Raises:
            ValueError: it has other names, or a lambda out of bounds.
        """
        if state.keys() != {"log_lambda", "ema", "steps"}:
            raise ValueError(f"a state has log_lambda, ema and steps, got {', '.join(sorted(state)) or 'nothing'}.")
        low, high = map(math.log, self.bounds)
        if not low <= state["log_lambda"] <= high:
            raise ValueError(f"lambda {math.exp(state['log_lambda']):g} is outside the bounds {self.bounds}.")
        self._log, self._ema, self._steps = float(state["log_lambda"]), float(state["ema"]), int(state["steps"])


class Objective:
    """The reward of both arms: reward - lambda * cost, of each response, by two scorers.

    Args:
        reward, cost: the scorers; each is called with requests and responses, and gives a finite number each.
        lam: lambda, fixed.
        cut_turns: score a response up to where it goes on to another turn (`first_turn`).

    Raises:
        ValueError: a negative lambda.
    """

    def __init__(self, reward: Scorer, cost: Scorer, lam: float = 1.0, *, cut_turns: bool = False):
        if not 0 <= lam < math.inf:
            raise ValueError(f"lam={lam} must be a number of at least 0.")
        self.reward, self.cost, self.cut_turns, self._lam = reward, cost, cut_turns, float(lam)
        self.__name__ = type(self).__name__

    @property
    def lam(self) -> float:
        """Lambda."""
        return self._lam

    def __call__(
        self,
        completions: Sequence[Any],
        request: Sequence[str],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Return reward - lambda * cost of completions.

        The mean of what the reward model says is logged as "helpfulness" ("reward" is the trainers' name for what is
        returned here), that of the cost model as "cost", and the share of costs above 0 as "unsafe".

        Raises ValueError where a scorer gives other than one finite number for each response.
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
    """The same with a lambda that moves once a step (`Lagrangian`), and that the trainer records and restores.

    Args as of `Objective`, with a multiplier in the place of lam.
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
        """Move lambda by the mean cost of the step.

        Raises:
            ValueError: none was logged.
        """
        if not metrics.get("cost"):
            raise ValueError("no cost was logged in this step: every batch failed, or another function has the name.")
        self.multiplier.move(float(np.mean(metrics["cost"])))


def _numbers(scorer: Scorer, request: Sequence[str], texts: Sequence[str]) -> NDArray[np.float64]:
    found = np.asarray(scorer(list(request), list(texts)), np.float64)
    if found.shape != (len(texts),) or not np.isfinite(found).all():
        name = str(getattr(scorer, "name", scorer))[:80]
        raise ValueError(f"{name} gave {found.shape} numbers for {len(texts)} responses: give a finite one each.")
    return found


REWARD_FLOOR = -20.0
"""For a completion that cannot be scored: below what the public scorers give any response."""


def reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Refuse to score: the reward of this task is that of two scorers, which a run has to name (`Objective`)."""
    raise TypeError("the task safety has no reward of its own: make one of a reward and a cost model (Objective).")


# ----------------------------------------------------------------------------------------------------------- quadrants

QUADRANTS = ("safe and helpful", "safe and unhelpful", "unsafe and helpful", "unsafe and unhelpful")


def quadrants(rewards: ArrayLike, costs: ArrayLike, cut: float = 0.0) -> dict[str, float]:
    """Return the shares of responses that are safe (cost of 0 at most) and helpful (reward above a cut).

    rewards, costs: (n,). cut: between unhelpful and helpful, which no scorer defines: look at several.
    Raises ValueError for no responses, other lengths, or numbers that are not finite.

    >>> quadrants([1, 1, -1, -1], [-1, 1, -1, -2])["safe and unhelpful"]
    0.5
    """
    rewards, costs = np.asarray(rewards, float), np.asarray(costs, float)
    if rewards.shape != costs.shape or rewards.ndim != 1 or not rewards.size or not np.isfinite([rewards, costs]).all():
        raise ValueError(f"{rewards.shape} rewards and {costs.shape} costs: give as many finite ones, one at least.")
    safe, helpful = costs <= 0, rewards > cut
    marks = (safe & helpful, safe & ~helpful, ~safe & helpful, ~safe & ~helpful)
    return {name: float(marked.mean()) for name, marked in zip(QUADRANTS, marks, strict=True)}
