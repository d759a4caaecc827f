"""Serve a reward or cost model over HTTP, so that several processes or other machines can share it.

    evoalign serve-scorer PKU-Alignment/beaver-7b-unified-reward --text beaver --port 8100 --device cuda:0

`evoalign_lib.reward_models.HTTPScorer` is its client. There are two requests, with JSON bodies both ways:

- `GET /identity` returns everything that determines a score (`RewardModel.identity`).
- `POST /score` with {"prompts": [text, ...], "completions": [text, ...]} returns {"scores": [number, ...],
  "identity": ..., "truncated": n}. Scores are bit for bit those of `RewardModel.score`; identity is the fingerprint of
  the model, which tells a client if the server was restarted with another one; n texts were too long and truncated.

Errors return {"detail": what is wrong and what to do}: 400 and 422 for a malformed body or texts that cannot be
scored, 401 without the key, 411 without a length, 413 for too much at once, 500 if the model fails.

Why a server of our own: the published service split a single text at turn markers, and so could score a different text
from the one sent. vLLM's pooling endpoints are faster on a large GPU, but accept only one text, or messages rendered by
the server's own template; apply a softmax or sigmoid unless told not to; turn any language model into a classifier on
request; do not know the layout of Safe-RLHF's score models; and name the model in their answers, but not its weights.
Each of these could silently change the reward that trains a policy.
"""

# no postponed annotations: FastAPI could not resolve those of the functions inside `app_of`
import hmac
import json
import logging
import threading
from typing import Any

import numpy as np

from evoalign_lib.checks import key_in, require
from evoalign_lib.reward_models import RewardModel, ScorerError, fingerprint

MOST_TEXTS = 1024
MOST_BYTES = 16 * 2**20
_LOCAL = ("localhost", "127.0.0.1", "::1")

_log = logging.getLogger(__name__)


def app_of(reward_model: RewardModel, *, api_key: str | None = None) -> Any:
    """Return the FastAPI application that serves a model.

    Requests are computed one at a time, in batches of `RewardModel.batch_size`. A request may have at most
    `MOST_TEXTS` completions and `MOST_BYTES` bytes.

    Args:
        reward_model: the model to serve.
        api_key: the key that clients must send ("Authorization: Bearer ..."); None: no key needed.

    Raises:
        ValueError: an empty key.
    """
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel, ConfigDict

    require(api_key is None or api_key, "api_key is empty: pass a key, or None for a server without one.")
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
        # say where and why, but do not repeat the texts
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        told = f'{where}: {first["msg"]}. Send {{"prompts": [text, ...], "completions": [text, ...]}}.'
        return JSONResponse({"detail": told}, 422)

    @app.get("/identity")
    async def tell() -> dict[str, Any]:
        return identity

    @app.post("/score")
    def score(pairs: Pairs) -> JSONResponse:  # not a coroutine, so that FastAPI calls it in a thread
        n = len(pairs.completions)
        if len(pairs.prompts) != n:
            raise HTTPException(422, f"{len(pairs.prompts)} prompts for {n} completions: send one prompt for each.")
        if n > MOST_TEXTS:
            raise HTTPException(413, f"{n} completions in one request: send {MOST_TEXTS} at most.")
        try:
            with turn:
                before = reward_model.counts["truncated"]
                scores = reward_model.score(pairs.prompts, pairs.completions)
                if not np.isfinite(scores).all():  # of a model with a `shift`, say: JSON has no such numbers
                    raise ScorerError(f"{reward_model.name!r} gave a score that is not finite: check its weights.")
                cut = reward_model.counts["truncated"] - before
        except (ValueError, TypeError) as error:
            raise HTTPException(422, str(error)) from None
        except ScorerError as error:
            raise HTTPException(500, str(error)) from None
        except Exception as error:  # such as an out-of-memory error; its text is for the log only
            _log.exception("the model failed on %d texts", n)
            raise HTTPException(500, f"the model failed ({type(error).__name__}): see the server's log.") from None
        return JSONResponse({"scores": scores.tolist(), "identity": mark, "truncated": cut})

    return app


def _refusal(request: Any, api_key: str | None) -> tuple[int, str] | None:
    """Return status and message if a request is refused for its headers, before its body is read; None if it is not."""
    headers, sent = request.headers, request.headers.get("authorization", "").encode()
    if api_key is not None and not hmac.compare_digest(sent, f"Bearer {api_key}".encode()):
        return 401, "no key, or a wrong one: pass HTTPScorer the variable that holds the server's key as api_key_env."
    if request.method in ("GET", "HEAD"):
        return None
    length = headers.get("content-length", "")
    # chunked encoding would override a stated length; without it the web server enforces the length
    if "transfer-encoding" in headers or not length.isdecimal():
        return 411, "no Content-Length: send the body in one piece, with its length."
    if int(length) > MOST_BYTES:
        return 413, f"a body of {int(length)} bytes: send {MOST_BYTES} at most, in several requests."
    return None


def serve(
    model: Any, *, host: str = "127.0.0.1", port: int = 8100, api_key_env: str | None = None, **options: Any
) -> None:
    """Load a model and serve it until the process ends.

    Args:
        model: as for `RewardModel`.
        host: address to listen on. Anyone who can reach it can have texts scored, so an address that other machines can
            reach needs a key.
        port: port to listen on; 0: any free one, which the log names.
        api_key_env: the environment variable with the key that clients must send; None: no key.
        **options: further arguments of `RewardModel`, such as text, device, dtype or max_length.

    Raises:
        ValueError: as for `RewardModel`; no key in the variable, or one that no HTTP header can hold; or no key for an
            address that other machines can reach.
        SystemExit: the port is taken.
    """
    import uvicorn

    key = None if api_key_env is None else key_in(api_key_env)
    if key is None and host not in _LOCAL:
        raise ValueError(f"host={host!r} can be reached from other machines: set api_key_env to a variable with a key.")
    scorer = RewardModel(model, **options)
    print(json.dumps(scorer.identity), flush=True)
    # connections should survive a training step, which may take longer than uvicorn's default of 5 s
    how = {"http": "h11", "access_log": False, "timeout_keep_alive": 75}
    uvicorn.run(app_of(scorer, api_key=key), host=host, port=port, **how)
