"""What a chat judge's backend returns.

A backend has `model`, a name for records; `special_tokens`, which judged texts must not hold; `identity()`, all that
decides its answers; and `answers(conversations, keep)`. A single failure is an `Answer` with an error, never an
exception and never a text. What would fail every time (a wrong key, a model that is not there) stops at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

ERRORS = ("timeout", "connection", "http", "malformed", "refused", "too long", "special token")
"""Why there is no answer: none in time; no connection; an HTTP error; a reply that is no chat completion; a refusal by
the provider's filter; a prompt beyond the model's context; a text with a special token that could not be broken."""

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Answer:
    """What a judge said.

    Attributes:
        text: None after a failure.
        prompt_tokens: that the request took; None: unknown.
        completion_tokens: that the request took; None: unknown.
        cut: whether the answer reached the limit of its tokens.
        error: one of `ERRORS` after a failure.
        detail: of the failure.
    """

    text: str | None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cut: bool = False
    error: str | None = None
    detail: str = ""


Keep = Callable[[int, Answer], object]
"""Takes the index of a conversation and its answer as soon as it is there; endpoints call it from several threads."""
