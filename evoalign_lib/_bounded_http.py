"""An HTTP client for servers that may send anything: bounds on an answer's bytes and on a request's seconds."""

import threading
from concurrent.futures import Future
from contextlib import closing
from types import ModuleType
from typing import Any

MOST = 16 * 2**20
"""bytes of an answer's body"""


def client(http: ModuleType, seconds: float, **options: Any) -> Any:
    """Return an HTTP client. It follows no redirections, and its requests raise the module's own errors.

    A request that is not answered in full in time, however slowly its bytes arrive, raises ReadTimeout. An answer that
    is compressed, and so could expand without limit, or that has more than `MOST` bytes, raises RemoteProtocolError.

    Args:
        http: httpx, or httpx2, which the openai client uses.
        seconds: limit of a request, from connecting to the last byte.
        **options: arguments of the module's Client.
    """

    def read(answer: Any, over: threading.Event) -> bytes:
        if (coding := answer.headers.get("content-encoding", "identity")) != "identity":
            raise http.RemoteProtocolError(f"a compressed answer ({coding:.40}), though none was asked for")
        found = bytearray()
        for part in answer.iter_raw():
            found += part
            if over.is_set() or len(found) > MOST:
                raise http.RemoteProtocolError(f"an answer of more than {MOST >> 20} MB")
        return bytes(found)

    class Bounded(http.Client):
        def send(self, request: Any, **how: Any) -> Any:
            request.headers["accept-encoding"] = "identity"
            how |= {"stream": True, "follow_redirects": False}
            done, over, send = Future(), threading.Event(), super().send

            def receive() -> None:
                try:
                    with closing(send(request, **how)) as answer:
                        told = {"headers": answer.headers, "content": read(answer, over), "request": request}
                    done.set_result(http.Response(answer.status_code, **told))
                except BaseException as error:
                    done.set_exception(error)

            # a thread of its own, because no setting of the client limits the time of a whole request
            threading.Thread(target=receive, daemon=True).start()
            try:
                return done.result(seconds)
            except TimeoutError as error:
                raise http.ReadTimeout(f"no whole answer in {seconds:g} s", request=request) from error
            finally:
                over.set()

    return Bounded(timeout=seconds, **options)
