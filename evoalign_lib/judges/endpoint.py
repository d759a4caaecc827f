"""Backend for chat judges behind an OpenAI-compatible address."""

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from evoalign_lib import _bounded_http
from evoalign_lib.checks import address, as_told, choose, key_in, plain, positive, whole_number, without_key
from evoalign_lib.judges.answers import Answer, Keep, Messages

_OPENAI = "https://api.openai.com/v1"
_RETRIED = {408, 409, 429}  # by the openai client, as are all from 500
_STOPS = {401, 402, 403, 404}  # a wrong key, no credit, a model not allowed for this key, no such model
_STOPPING_CODES = {"insufficient_quota", "billing_hard_limit_reached", "unsupported_parameter", "unsupported_value"}
_MOST_FAILURES = 20  # in a row


class EndpointError(RuntimeError):
    """Every further request would fail as well; the message says why. Answers received so far are in the cache."""


@dataclass(frozen=True)
class Endpoint:
    """A model behind an OpenAI-compatible address, called by its chat completions API.

    The address is not part of the identity, since a local server's address changes from run to run: give each model its
    own name.

    Attributes:
        model: its name on the server.
        base_url: address up to "/v1"; None: OpenAI's.
        api_key_env: the environment variable with the key, which is read at each call, stored nowhere, and sent to
            base_url: name another variable for another provider. Your own server may need no key.
        timeout: seconds after which a request is given up, however slowly the server still answers.
        retries: number of retries after a time-out, a lost connection, or HTTP error 408, 409, 429 or 5xx. The openai
            client makes them, and waits as long as the server asks, or twice as long each time.
        temperature: 0: greedy, as far as the server complies; None: the server's own, for models that take no other.
        max_tokens: most tokens in an answer.
        token_limit: the server's name of max_tokens; newer models of OpenAI take only "max_completion_tokens".
        seed: sent to the server; None: no seed is sent.
        concurrency: number of simultaneous requests.
    """

    model: str
    base_url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    timeout: float = 60.0
    retries: int = 3
    temperature: float | None = 0.0
    max_tokens: int = 1024
    seed: int | None = 0
    concurrency: int = 8
    token_limit: str = "max_tokens"

    def __post_init__(self) -> None:
        vars(self).update(plain(vars(self)))  # numbers of NumPy, which no cache takes
        whole_number("retries", self.retries, least=0)
        whole_number("max_tokens", self.max_tokens)
        whole_number("concurrency", self.concurrency)
        positive("timeout", self.timeout)
        choose("token_limit", self.token_limit, ("max_tokens", "max_completion_tokens"))
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature={self.temperature} must lie between 0 and 2.")
        if self.base_url is not None:
            address("base_url", self.base_url)

    def identity(self) -> dict[str, Any]:
        """Return everything that determines an answer, for the cache's keys and for records."""
        other = ("token_limit",) if self.token_limit != "max_tokens" else ()  # earlier identities stay as they are
        fields = ("model", "temperature", "max_tokens", "seed", *other)
        return {"backend": "endpoint"} | {name: getattr(self, name) for name in fields}

    def answers(self, conversations: Sequence[Messages], keep: Keep | None = None) -> list[Answer]:
        """Return an answer to each conversation, in their order.

        After an exception, including Ctrl-C, no further request starts, and requests already sent are awaited, since
        they are paid for in any case.

        Args:
            conversations: lists of messages.
            keep: called with each answer that is not a failure as soon as it arrives.

        Raises:
            ValueError: no key, or one that does not fit into an HTTP header.
            EndpointError: a wrong key, an unknown model, an account without credit, or 20 questions in a row without an
                answer after all retries.
        """
        key = key_in(self.api_key_env, needed=self.base_url is None)
        import openai

        url = self.base_url or _OPENAI
        failures = 0  # in a row
        stopped = threading.Event()
        answers: list[Any] = [None] * len(conversations)

        def ask(i: int) -> Answer | None:
            """Ask one question; return its answer only if it is a failure that may mean that the server is gone."""
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

        http = _bounded_http.client(sys.modules[openai.DefaultHttpxClient.__base__.__module__], self.timeout)
        how = {"timeout": self.timeout, "max_retries": self.retries, "http_client": http}
        client = openai.OpenAI(api_key=key or "none", base_url=url, **how)
        with client, ThreadPoolExecutor(self.concurrency) as pool:
            try:
                for last in pool.map(ask, range(len(conversations))):
                    failures = failures + 1 if last else 0
                    if failures >= _MOST_FAILURES:
                        told = f"failed in a row, the last by {last.error!r} ({last.detail})"
                        remedy = f"check that {url} is up, and call again"
                        raise EndpointError(f"{failures} questions to {self.model!r} {told}: {remedy}.")
            finally:
                stopped.set()  # tasks that still wait in the pool return at once
        return answers

    def _ask(self, client: Any, key: str, messages: Messages) -> tuple[Answer, bool]:
        """Return an answer with the key removed, and whether its failure may mean that the server is gone.

        A server that only rejects a text, for instance as too long, is not gone.
        """
        import openai

        url = self.base_url or _OPENAI
        how = {"temperature": self.temperature, self.token_limit: self.max_tokens, "seed": self.seed}
        how = {name: value for name, value in how.items() if value is not None}
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
        except openai.APIConnectionError as error:
            why = f"no connection to {url}: {error.__cause__}"
            answer, gone = Answer(None, error="connection", detail=why), True
        except (openai.OpenAIError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            answer = Answer(None, error="malformed", detail=f"no chat completion: {error}")
        # some servers repeat the key in their messages
        text, detail = answer.text and without_key(answer.text, key), as_told(answer.detail, key, 200)
        if stops:  # raise outside the handlers: a chained error would carry the request, and with it the key
            settings = "its settings (a model may need token_limit='max_completion_tokens' and temperature=None)"
            remedy = (
                f"Correct the model, the base_url, {settings} or the key in {self.api_key_env}, or top up the account"
            )
            raise EndpointError(f"{url} refuses {self.model!r}: {detail}. {remedy}, and call again.")
        return replace(answer, text=text, detail=detail), gone


def _read(reply: Any) -> Answer:
    """Read a chat completion without trusting its fields.

    Raises:
        AttributeError, LookupError, TypeError: it is not a chat completion.
    """
    message, end = reply.choices[0].message, getattr(reply.choices[0], "finish_reason", None)
    counts = [getattr(reply.usage, name, None) for name in ("prompt_tokens", "completion_tokens")]
    counts = [n if type(n) is int and 0 <= n < 2**53 else None for n in counts]
    if end == "content_filter" or message.refusal:
        return Answer(None, *counts, error="refused", detail=str(message.refusal or end))
    if message.content is None and end == "length":  # the model was still thinking at its token limit
        return Answer("", *counts, cut=True)
    if not isinstance(message.content, str):
        raise TypeError("its content is not a text")
    return Answer(message.content, *counts, cut=end == "length")
