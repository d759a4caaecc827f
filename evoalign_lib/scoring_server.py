"""A server for a reward or cost model, so that several processes, or another machine, can share one.

    evoalign serve-scorer PKU-Alignment/beaver-7b-unified-reward --text beaver --port 8100 --device cuda:0

`evoalign_lib.reward_models.HTTPScorer` is its client. Two requests, JSON both ways:

- `GET /identity`: what decides a score (`RewardModel.identity`).
- `POST /score` with {"prompts": [text, ...], "completions": [text, ...]}: {"scores": [number, ...], "identity": ...,
  "truncated": n}. Scores are those of `RewardModel.score`, bit for bit; identity is the fingerprint of the model, so
  that a client sees when the server was started anew with another; n texts were too long and cut.

Errors say {"detail": what is wrong and what to do}: 400 and 422 for a body that is none of these or texts that cannot
be scored, 401 without the key, 411 without a length, 413 for too much at once, 500 where the model fails.

The published service answered with another text than it was asked about: it split one text at turn markers. vLLM's
pooling endpoints are faster on a large GPU, but take one text, or messages by the server's own template; apply a
softmax or sigmoid unless told not to; turn any language model into a classifier if asked to; do not know the layout of
Safe-RLHF's score models; and their answers name a model, but not its weights. A reward that trains a policy needs
none of these surprises.
"""

# no postponed annotations: FastAPI reads those of functions inside `app_of`
import hmac
import json
import logging
import threading
from typing import Any

from evoalign_lib.checks import key_in
from evoalign_lib.reward_models import RewardModel, ScorerError, fingerprint

MOST_TEXTS = 1024
MOST_BYTES = 16 * 2**20
_LOCAL = ("localhost", "127.0.0.1", "::1")

_log = logging.getLogger(__name__)


def app_of(reward_model: RewardModel, *, api_key: str | None = None) -> Any:
    """Return the FastAPI application that serves a model.

    The model computes one request after the other, in batches of `RewardModel.batch_size`. A request may have
    `MOST_TEXTS` completions and `MOST_BYTES`.

    Args:
        reward_model: the model.
        api_key: what clients have to send ("Authorization: Bearer ..."); None: nothing.

    Raises:
        ValueError: an empty key.
    """
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel, ConfigDict

    if api_key is not None and not api_key:
        raise ValueError("api_key is empty: give one, or None for a server without.")
    identity = reward_model.identity
    mark = fingerprint(identity)
    turn = threading.Lock()

    class Pairs(BaseModel):
        model_config = ConfigDict(strict=True, extra="forbid")
        prompts: list[str]
        completions: list[str]

    app = FastAPI(title="EvoAlign scorer", version=identity["version"])

    @app.middleware("http")
    async def gate(request: Request, call_next: Any) -> Any:
        if refusal := _refusal(request, api_key):
            return JSONResponse({"detail": refusal[1]}, refusal[0], {"Connection": "close"})
        return await call_next(request)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        # where and why, without the texts themselves
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        told = f'{where}: {first["msg"]}. Send {{"prompts": [text, ...], "completions": [text, ...]}}.'
        return JSONResponse({"detail": told}, 422)

    @app.get("/identity")
    async def tell() -> dict[str, Any]:
        return identity

    @app.post("/score")
    def score(pairs: Pairs) -> JSONResponse:  # no coroutine: FastAPI calls it in a thread
        n = len(pairs.completions)
        if len(pairs.prompts) != n:
            raise HTTPException(422, f"{len(pairs.prompts)} prompts for {n} completions: send one each.")
        if n > MOST_TEXTS:
            raise HTTPException(413, f"{n} completions in one request: send {MOST_TEXTS} at most.")
        try:
            with turn:
                before = reward_model.counts["truncated"]
                scores = reward_model.score(pairs.prompts, pairs.completions)
                cut = reward_model.counts["truncated"] - before
        except (ValueError, TypeError) as error:
            raise HTTPException(422, str(error)) from None
        except ScorerError as error:
            raise HTTPException(500, str(error)) from None
        except Exception as error:  # such as no memory on a GPU; what it says is for the log
            _log.exception("the model failed on %d texts", n)
            raise HTTPException(500, f"the model failed ({type(error).__name__}): see the server's log.") from None
        return JSONResponse({"scores": scores.tolist(), "identity": mark, "truncated": cut})

    return app


def _refusal(request: Any, api_key: str | None) -> tuple[int, str] | None:
    """Return by the headers of a request, before its body is read, why it is refused: status and words."""
    headers, sent = request.headers, request.headers.get("authorization", "").encode()
    if api_key is not None and not hmac.compare_digest(sent, f"Bearer {api_key}".encode()):
        return 401, "send the server's key: give HTTPScorer the variable that holds it as api_key_env."
    if request.method in ("GET", "HEAD"):
        return None
    length = headers.get("content-length", "")
    # chunks would win over a stated length; without them the web server holds the body to it
    if "transfer-encoding" in headers or not length.isdecimal():
        return 411, "send the body in one piece, with its length."
    if int(length) > MOST_BYTES:
        return 413, f"a body of {int(length)} bytes: send {MOST_BYTES} at most, in several requests."
    return None


def serve(
    model: Any, *, host: str = "127.0.0.1", port: int = 8100, api_key_env: str | None = None, **options: Any
) -> None:
    """Load a model and serve it until the process is ended.

    Args:
        model: as for `RewardModel`.
        host: address to listen at. Whoever reaches it can have texts scored: one that is not of this machine alone
            needs a key.
        port: 0: any that is free; the log says which.
        api_key_env: the environment variable with the key that clients have to send; None: no key.
        **options: further arguments of `RewardModel`, such as text, device, dtype or max_length.

    Raises:
        ValueError: as `RewardModel`; no key in the variable, or one that no HTTP header can hold; or no key for an
            address that others can reach.
        SystemExit: the port is taken.
    """
    import uvicorn

    key = None if api_key_env is None else key_in(api_key_env)
    if key is None and host not in _LOCAL:
        raise ValueError(f"host={host!r} can be reached by others: name a variable with a key as api_key_env.")
    scorer = RewardModel(model, **options)
    print(json.dumps(scorer.identity), flush=True)
    # a training step may take longer than uvicorn's 5 s, and connections are to last
    uvicorn.run(app_of(scorer, api_key=key), host=host, port=port, access_log=False, timeout_keep_alive=75)
