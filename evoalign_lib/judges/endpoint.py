"""Chat judges behind an OpenAI-compatible address."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from evoalign_lib.checks import address, key_in, positive, whole_number
from evoalign_lib.judges.answers import Answer, Keep, Messages

_OPENAI = "https://api.openai.com/v1"
_RETRIED = {408, 409, 429}  # by the openai client, and all from 500
_STOPS = {401, 402, 403, 404}  # a wrong key, no credit, a model that is not for this key, or that is not there
_STOPPING_CODES = {"insufficient_quota", "billing_hard_limit_reached", "unsupported_parameter", "unsupported_value"}
_MOST_FAILURES = 20  # in a row


class EndpointError(RuntimeError):
    """Every further request would fail, too; the message says why. What was answered until then is in the cache."""


@dataclass(frozen=True)
class Endpoint:
    """A model behind an OpenAI-compatible address, by its chat completions.

    The address is no part of the identity, since that of a local server changes from run to run: give each model a name
    of its own.

    Attributes:
        model: its name there.
        base_url: address up to "/v1"; None: OpenAI's.
        api_key_env: the environment variable with the key, read at each call and kept nowhere. It goes to base_url:
            name another variable for another provider. A server of one's own may need none.
        timeout: seconds without a byte from the server after which a request is given up.
        retries: of a request after a time-out, a lost connection, or one of the HTTP errors 408, 409, 429 and 5xx, by
            the openai client, which waits as long as the server asks for, or twice as long each time.
        temperature: 0: greedy, as far as the server keeps to it.
        max_tokens: of an answer.
        seed: for the server; None: none is sent.
        concurrency: requests at the same time.
    """

    model: str
    base_url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    timeout: float = 60.0
    retries: int = 3
    temperature: float = 0.0
    max_tokens: int = 1024
    seed: int | None = 0
    concurrency: int = 8
    special_tokens: ClassVar[tuple[str, ...]] = ()
    """None are known; those of the usual families are broken in any case."""

    def __post_init__(self) -> None:
        whole_number("retries", self.retries, least=0)
        whole_number("max_tokens", self.max_tokens)
        whole_number("concurrency", self.concurrency)
        positive("timeout", self.timeout)
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature={self.temperature} must be from 0 to 2.")
        if self.base_url is not None:
            address("base_url", self.base_url)

    def identity(self) -> dict[str, Any]:
        """Return all that decides an answer, for the cache's keys and for records."""
        fields = ("model", "temperature", "max_tokens", "seed")
        return {"backend": "endpoint"} | {name: getattr(self, name) for name in fields}

    def answers(self, conversations: Sequence[Messages], keep: Keep | None = None) -> list[Answer]:
        """Return an answer to each conversation, in their order.

        After an exception, Ctrl-C included, no request starts any more, and those under way are awaited: they will have
        been paid for.

        Args:
            conversations: messages each.
            keep: takes each answer that is no failure as soon as it is there.

        Raises:
            ValueError: no key, or one that no HTTP header can hold.
            EndpointError: a wrong key, an unknown model, a spent account, or 20 questions in a row without an answer
                after all retries.
        """
        key = key_in(self.api_key_env, needed=self.base_url is None)
        import openai

        url = self.base_url or _OPENAI
        failures = 0  # in a row
        stopped = threading.Event()
        answers: list[Any] = [None] * len(conversations)

        def ask(i: int) -> Answer | None:
            """Return a failure that may mean that the server is gone."""
            if stopped.is_set():
                return None
            try:
                answers[i], gone = self._ask(client, key, conversations[i])
                if keep is not None and answers[i].error is None:
                    keep(i, answers[i])
            except BaseException:
                stopped.set()  # at once, for the other threads
                raise
            return answers[i] if gone else None

        client = openai.OpenAI(api_key=key or "none", base_url=url, timeout=self.timeout, max_retries=self.retries)
        with client, ThreadPoolExecutor(self.concurrency) as pool:
            try:
                for last in pool.map(ask, range(len(conversations))):
                    failures = failures + 1 if last else 0
                    if failures >= _MOST_FAILURES:
                        raise EndpointError(
                            f"{failures} questions to {self.model!r} failed in a row, the last by {last.error!r} "
                            f"({last.detail}): see whether {url} is up, and call again."
                        )
            finally:
                stopped.set()  # what waits in the pool returns at once
        return answers

    def _ask(self, client: Any, key: str, messages: Messages) -> tuple[Answer, bool]:
        """Return an answer without the key, and whether its failure may mean that the server is gone.

        A server that refuses a text, such as one that is too long, is there.
        """
        import openai

        url = self.base_url or _OPENAI
        how = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        how |= {} if self.seed is None else {"seed": self.seed}
        gone = stops = False
        try:
            answer = _read(client.chat.completions.create(model=self.model, messages=[*map(dict, messages)], **how))
        except openai.APITimeoutError:
            answer, gone = Answer(None, error="timeout", detail=f"no answer within {self.timeout} s"), True
        except openai.APIStatusError as error:
            status = error.status_code
            code = str(error.code or status)
            kind = "refused" if code == "content_filter" else "http"
            answer = Answer(None, 0, 0, error=kind, detail=f"{code}: {error}")
            gone = status in _RETRIED or status >= 500
            stops = status in _STOPS or code in _STOPPING_CODES
        except openai.APIConnectionError:
            answer, gone = Answer(None, error="connection", detail=f"no connection to {url}"), True
        except (openai.OpenAIError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            answer = Answer(None, error="malformed", detail=f"no chat completion: {error!r}")
        # some servers repeat the key
        text, detail = (said.replace(key, "***") if key and said else said for said in (answer.text, answer.detail))
        if stops:  # outside the handlers, so that no error carries the request, and with it the key
            raise EndpointError(
                f"{url} refuses {self.model!r}: {detail:.200}. Correct the model, the base_url, its settings or the "
                f"key in {self.api_key_env}, or top up the account, and call again."
            )
        return replace(answer, text=text, detail=detail[:200]), gone


def _read(reply: Any) -> Answer:
    """Read a chat completion, whose fields may be anything.

    Raises:
        AttributeError, LookupError, TypeError: it is none.
    """
    message, end = reply.choices[0].message, getattr(reply.choices[0], "finish_reason", None)
    counts = [getattr(reply.usage, name, None) for name in ("prompt_tokens", "completion_tokens")]
    counts = [n if type(n) is int and 0 <= n < 2**53 else None for n in counts]
    if end == "content_filter" or message.refusal:
        return Answer(None, *counts, error="refused", detail=str(message.refusal or end))
    if message.content is None and end == "length":  # a model that thought until its limit
        return Answer("", *counts, cut=True)
    if not isinstance(message.content, str):
        raise TypeError("its content is no text")
    return Answer(message.content, *counts, cut=end == "length")
