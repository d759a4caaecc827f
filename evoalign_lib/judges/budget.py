"""What judging may cost, checked before each request."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence

_PER_MESSAGE = 100


class BudgetSpent(RuntimeError):
    """The next request might pass the budget; what was answered until then is in the cache."""


def most_prompt_tokens(messages: Sequence[Mapping[str, str]]) -> int:
    """Return an upper bound of the tokens of messages: the UTF-8 bytes of the texts, and 100 for each message.

    Byte-level and SentencePiece tokenizers spend at most one token a byte; the rest is for role names and what chat
    templates add.
    """
    return sum(len(message["content"].encode()) + _PER_MESSAGE for message in messages)


class Budget:
    """Limits of calls, tokens and dollars. A request starts only if its worst case fits into what is left.

    The worst case is `most_prompt_tokens` and the judge's max_tokens. What a request took in fact replaces it once the
    answer is there. A request that was lost (a time-out, a broken answer) may have been billed and counts in full; one
    that the server refused counts as a call without tokens. Answers from the cache cost nothing. A budget counts what
    was spent since it was made; to go on after it is spent, give a new one.

    Args:
        calls: requests, retries included.
        tokens: of prompts and answers.
        dollars: needs `prices`.
        prices: dollars for a million prompt tokens, and for a million tokens of answers.

    Raises:
        ValueError: no limit at all, a limit that is not positive, or dollars without prices.
    """

    def __init__(
        self,
        calls: int | None = None,
        tokens: int | None = None,
        dollars: float | None = None,
        prices: tuple[float, float] | None = None,
    ):
        self.limits = {"calls": calls, "tokens": tokens, "dollars": dollars}
        given = {name: limit for name, limit in self.limits.items() if limit is not None}
        if not given:
            raise ValueError("a budget needs a limit: give calls, tokens, or dollars with prices.")
        for name, limit in given.items():
            if not 0 < limit < math.inf:
                raise ValueError(f"{name}={limit} must be a positive number, or None for no limit.")
        if dollars is not None and prices is None:
            raise ValueError(f"dollars={dollars} needs prices: (prompt, answer), in dollars for a million tokens.")
        if prices is not None and not all(0 <= price < math.inf for price in prices):
            raise ValueError(f"prices={prices} must be two numbers that are not negative.")
        self.prices = prices
        self._spent = dict.fromkeys(self.limits, 0.0)
        self._open: dict[int, dict[str, float]] = {}
        self._changed = threading.Condition()
        self._next = 0

    @property
    def spent(self) -> dict[str, float]:
        """What was spent: calls, tokens, dollars (0 without prices); requests under way not among them."""
        with self._changed:
            return {"calls": int(self._spent["calls"]), "tokens": int(self._spent["tokens"])} | {
                "dollars": self._spent["dollars"]
            }

    def reserve(self, prompt: int, answer: int, wait: bool = True) -> int | None:
        """Set the worst case of one request aside, and return the number of the reservation.

        Args:
            prompt: tokens at most.
            answer: tokens at most.
            wait: where it does not fit, wait while requests are under way, which may take less than was set aside for
                them, and raise if it does not fit then; False: return None at once.

        Raises:
            BudgetSpent: it does not fit.
        """
        cost = self._cost(prompt, answer)
        with self._changed:
            while lacking := self._lacking(cost):
                if not wait:
                    return None
                if not self._open:
                    raise BudgetSpent(
                        f"{self._spent[lacking]:g} of {self.limits[lacking]:g} {lacking} are spent, and the next "
                        f"request may take {cost[lacking]:g}"
                    )
                self._changed.wait()
            self._next += 1
            self._open[self._next] = cost
            return self._next

    def settle(self, number: int, prompt: int | None, answer: int | None) -> None:
        """Replace a reservation by what the request took; None: unknown, the worst case stands."""
        with self._changed:
            cost = self._open.pop(number)
            if prompt is not None and answer is not None:
                cost = self._cost(prompt, answer)
            for name, amount in cost.items():
                self._spent[name] += amount
            self._changed.notify_all()

    def _cost(self, prompt: int, answer: int) -> dict[str, float]:
        dollars = (prompt * self.prices[0] + answer * self.prices[1]) / 1e6 if self.prices else 0.0
        return {"calls": 1, "tokens": prompt + answer, "dollars": dollars}

    def _lacking(self, cost: Mapping[str, float]) -> str | None:
        """Return the first limit into which a cost does not fit."""
        for name, limit in self.limits.items():
            under_way = sum(request[name] for request in self._open.values())
            if limit is not None and self._spent[name] + under_way + cost[name] > limit:
                return name
        return None
