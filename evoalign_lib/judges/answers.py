"""Answers of chat judges, and the interface of the backends that return them.

A backend has `model`, a name for records; `identity()`, everything that determines its answers; and
`answers(conversations, keep)`. A single failure is an `Answer` with an error, never an exception and never a text. An
error that would recur every time (a wrong key, a missing model) stops at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

ERRORS = ("timeout", "connection", "http", "malformed", "refused")
"""Reasons for a missing answer: a time-out; no connection; an HTTP error, such as that for a prompt beyond the model's
context; a reply that is not a chat completion; a refusal by the provider's filter."""

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Answer:
    """An answer of a judge, or its failure to give one.

    Attributes:
        text: the answer; None after a failure.
        prompt_tokens: tokens in the prompt; None: unknown.
        completion_tokens: tokens in the completion; None: unknown.
        cut: whether the answer was cut at its token limit.
        error: one of `ERRORS` after a failure, otherwise None.
        detail: details of the failure.
    """

    text: str | None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cut: bool = False
    error: str | None = None
    detail: str = ""


Keep = Callable[[int, Answer], object]
"""Takes the index of a conversation and its answer as soon as it arrives; endpoints call it from several threads."""
