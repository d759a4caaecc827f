"""Chat judges behind an OpenAI-compatible address."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from evoalign_lib.checks import key_in, whole_number
from evoalign_lib.judges.answers import Answer, Messages, Meter

_OPENAI = "https://api.openai.com/v1"
_RETRIED = {408, 409, 429}  # and all from 500
_STOPS = {
    401: "the key is wrong",
    402: "the account has no credit",
    403: "the key may not use this model",
    404: "no such model or address",
}
_STOPPING_CODES = {"insufficient_quota", "billing_hard_limit_reached", "unsupported_parameter", "unsupported_value"}
_MOST_FAILURES = 20  # in a row
_FIRST_WAIT, _LONGEST_WAIT, _LONGEST_ASKED = 0.5, 8.0, 60.0  # seconds
_NOT_SENT = Answer(None, 0, 0, error="http", detail="not sent")


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
        retries: of a request after a time-out, a lost connection, or one of the HTTP errors 408, 409, 429 and 5xx. The
            waits are those that the server asks for, up to 60 s, or 0.5, 1, 2, 4, 8, 8, ... s.
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

    def __post_init__(self) -> None:
        whole_number("retries", self.retries, least=0)
        whole_number("max_tokens", self.max_tokens)
        whole_number("concurrency", self.concurrency)
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout} must be a positive number of seconds.")
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature={self.temperature} must be from 0 to 2.")
        if self.base_url is not None:
            parts = urlsplit(self.base_url)
            if parts.username is not None or parts.password is not None or parts.query:
                raise ValueError(f"base_url holds a password or a query: put the key into {self.api_key_env} instead.")
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"base_url={self.base_url!r} must be an address such as http://localhost:8000/v1.")

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """None are known; those of the usual families are broken in any case."""
        return ()

    def identity(self) -> dict[str, Any]:
        """Return all that decides an answer, for the cache's keys and for records."""
        fields = ("model", "temperature", "max_tokens", "seed")
        return {"backend": "endpoint"} | {name: getattr(self, name) for name in fields}

    def answers(self, conversations: Sequence[Messages], meter: Meter | None = None) -> list[Answer]:
        """Return an answer to each conversation, in their order.

        After an exception, Ctrl-C included, no request starts any more, and those under way are awaited: they will have
        been paid for.

        Raises:
            ValueError: no key, or one that no HTTP header can hold.
            EndpointError: a wrong key, an unknown model, a spent account, or 20 questions in a row without an answer
                after all retries.
        """
        key = key_in(self.api_key_env)
        if not key and self.base_url is None:
            raise ValueError(f"no key in the environment: set {self.api_key_env}, or give the base_url of a server.")
        import openai

        found: list[Answer | None] = [None] * len(conversations)
        work = _Work(meter or Meter())
        # the client does not retry: each request is to pass the meter
        with openai.OpenAI(
            api_key=key or "none", base_url=self.base_url or _OPENAI, timeout=self.timeout, max_retries=0
        ) as client:

            def ask(i: int) -> None:
                try:
                    found[i] = self._ask(client, key, conversations[i], i, work)
                except BaseException:
                    work.stopped.set()  # at once, for the other threads
                    raise

            with ThreadPoolExecutor(self.concurrency) as pool:
                try:
                    for done in as_completed([pool.submit(ask, i) for i in range(len(conversations))]):
                        done.result()
                except BaseException:
                    work.stopped.set()
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
        return found

    def _ask(self, client: Any, key: str, messages: Messages, i: int, work: _Work) -> Answer | None:
        """Return an answer after as many requests as it takes; None once the work is stopped."""
        for attempt in range(self.retries + 1):
            if work.stopped.is_set():
                return None
            work.meter.before([i])
            answer, again, wait = _NOT_SENT, False, None
            try:
                if not work.stopped.is_set():  # while the meter let it wait
                    answer, again, wait = self._request(client, key, messages)
            finally:  # others may wait for what the meter has set aside
                work.meter.after(i, answer)
            if answer.error is None or not again or attempt == self.retries:
                break
            work.stopped.wait(min(_FIRST_WAIT * 2**attempt, _LONGEST_WAIT) if wait is None else wait)
        work.count(answer, again, self)
        return answer

    def _request(self, client: Any, key: str, messages: Messages) -> tuple[Answer, bool, float | None]:
        """Return an answer, whether to ask again after its error, and the seconds to wait before that, if stated."""
        import openai

        seed = {} if self.seed is None else {"seed": self.seed}
        try:
            reply = client.chat.completions.with_raw_response.create(
                model=self.model,
                messages=[dict(message) for message in messages],
                temperature=self.temperature,
                max_tokens=self.max_tokens,
                **seed,
            )
            answer = _completion(_without(key, reply.text))
            if answer.text is not None:  # JSON may have spelt it otherwise
                answer = replace(answer, text=_without(key, answer.text))
            return answer, False, None
        except openai.APITimeoutError:
            return Answer(None, error="timeout", detail=f"no answer within {self.timeout} s"), True, None
        except openai.APIStatusError as error:
            status, code, text = error.status_code, str(error.code), _without(key, str(error))
            wait = _seconds(error.response.headers.get("retry-after"))
        except openai.APIConnectionError:
            return Answer(None, error="connection", detail=f"no connection to {self.base_url or _OPENAI}"), True, None
        except (openai.OpenAIError, UnicodeError) as error:
            return Answer(None, error="malformed", detail=_without(key, str(error))[:200]), False, None
        # outside the handlers, so that no error carries the request, and with it the key
        if status in _STOPS or code in _STOPPING_CODES:
            reason = _STOPS.get(status, code)
            raise EndpointError(
                f"{self.base_url or _OPENAI} refuses {self.model!r}: {reason} (HTTP {status}: {text[:200]}). Correct "
                f"the model, the base_url, its settings, or the key in {self.api_key_env}, and call again."
            )
        kind = "refused" if code == "content_filter" else "http"
        again = status in _RETRIED or status >= 500
        return Answer(None, 0, 0, error=kind, detail=f"HTTP {status}: {text[:200]}"), again, wait


class _Work:
    """What the threads of one call share."""

    def __init__(self, meter: Meter):
        self.meter = meter
        self.stopped = threading.Event()
        self._lock, self._failures = threading.Lock(), 0

    def count(self, answer: Answer, again: bool, endpoint: Endpoint) -> None:
        """Raise EndpointError where the server seems to be gone: every answer after that would take all retries.

        again: whether it would be worth another request. A server that refuses a text, such as one that is too long,
        is there.
        """
        with self._lock:
            self._failures = self._failures + 1 if again else 0
            if self._failures >= _MOST_FAILURES:
                raise EndpointError(
                    f"{self._failures} questions to {endpoint.model!r} failed in a row, the last by {answer.error!r} "
                    f"({answer.detail}): see whether {endpoint.base_url or _OPENAI} is up, and call again."
                )


def _without(key: str, text: str) -> str:
    """Return a text of the server's without the key, which some servers repeat."""
    return text.replace(key, "***") if key else text


def _seconds(header: str | None) -> float | None:
    """Return the wait that a server asks for in seconds, at most the longest one that we grant; None: no number."""
    try:
        wait = float(header or "nan")
    except ValueError:  # a date
        return None
    return None if math.isnan(wait) else min(max(wait, 0.0), _LONGEST_ASKED)


def _completion(body: str) -> Answer:
    """Read the body of a chat completion, which may be anything."""

    def malformed(what: str) -> Answer:
        return Answer(None, error="malformed", detail=f"{what}: {body[:100]!r}")

    try:
        reply = json.loads(body)
    except (ValueError, RecursionError):
        return malformed("no JSON")
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return malformed("no choices")
    message, end = choices[0].get("message"), choices[0].get("finish_reason")
    if not isinstance(message, dict):
        return malformed("no message")
    usage = reply.get("usage") if isinstance(reply.get("usage"), dict) else {}
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    counts = [n if type(n) is int and 0 <= n < 2**53 else None for n in counts]
    if end == "content_filter" or message.get("refusal"):
        return Answer(None, *counts, error="refused", detail=str(message.get("refusal") or end)[:200])
    text = message.get("content")
    if text is None and end == "length":  # a model that thought until its limit
        text = ""
    if not isinstance(text, str):
        return malformed("no text")
    return Answer(text, *counts, cut=end == "length")
