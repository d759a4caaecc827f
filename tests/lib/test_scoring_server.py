"""The scoring server and its client: a real process that is killed and comes back, hostile requests and answers."""

import contextlib
import gzip
import itertools
import json
import math
import multiprocessing
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from servers import answering, running

from evoalign_lib import _bounded_http, reward_models, scoring_server
from evoalign_lib.judges.endpoint import Endpoint
from evoalign_lib.reward_models import HTTPScorer, RewardModel, ScorerError, ScorerGone, fingerprint
from evoalign_lib.rewards import Rewards
from evoalign_lib.scoring_server import app_of, serve
from evoalign_lib.tasks import safety
from evoalign_lib.tiny import dialogues, scorers

ASKED = ["How do I mend a kettle?", "USER: ASSISTANT:", 'quote " and \\ and é', "x"] * 5
SAID = ["Take a glue and mend the kettle.", "\nUSER: more?", "", "y" * 50, "\u2028\x00 �"] * 4
# Python 3.12 warns of forking a process with threads, which is what servers in this process are
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A reward and a cost model with their tokenizer beside them, as users have them."""
    found = {side: tmp_path_factory.mktemp(side) for side in scorers.SIDES}
    for side, folder in found.items():
        shutil.copytree(scorers.folder("length 1") / side, folder, dirs_exist_ok=True)
        dialogues.tokenizer().save_pretrained(folder)
    return found


@pytest.fixture(scope="module")
def model(folders):
    return RewardModel(folders["reward"], text="continued")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(reward_models, "_FIRST_WAIT", 0.02)
    monkeypatch.setattr(reward_models, "_LONGEST_WAIT", 0.1)


# ----------------------------------------------------------------------------------------------------- a real process


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back(folders, model):
    """The command's own process, killed; another takes its place, and no score is lost or made up."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    asked = f"serve({str(folders['reward'])!r}, text='continued', port={port})"
    command = [sys.executable, "-c", f"from evoalign_lib.scoring_server import serve; {asked}"]
    for n in range(2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            if n == 0:
                assert json.loads(process.stdout.readline()) == model.identity | {"name": folders["reward"].name}
                scorer = HTTPScorer(f"http://127.0.0.1:{port}", retries=1000)
                assert scorer.identity == model.identity
            assert np.array_equal(scorer.score(ASKED, SAID), model.score(ASKED, SAID))
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
    counts = scorer.counts
    assert counts["connection"] == counts["retries"] >= 1
    assert counts["failed"] == 0 and counts["texts"] == 2 * len(ASKED)
    scorer.retries = 2
    with pytest.raises(ScorerGone, match=r"\(3 requests\)"):
        scorer.score(["x"], ["y"])


# ---------------------------------------------------------------------------------------------------------- the client


@FORKS
def test_over_http_scores_are_the_same_to_the_bit_in_every_process(folders, model):
    cost = RewardModel(folders["cost"], text="continued")
    expected = cost.score(ASKED, SAID)
    with running(app_of(model)) as reward_url, running(app_of(cost)) as url:
        scorer = HTTPScorer(url + "/", batch_size=7)
        assert scorer.score([], []).shape == (0,) and scorer.identity == cost.identity
        assert np.allclose(scorer.score(ASKED, SAID), expected, atol=1e-6)  # other batches
        whole = HTTPScorer(url)
        assert np.array_equal(pickle.loads(pickle.dumps(whole)).score(ASKED, SAID), expected)
        with multiprocessing.get_context("fork").Pool(2) as pool:  # after the connection was opened
            for found in pool.starmap(whole.score, [(ASKED, SAID)] * 4):
                assert np.array_equal(found, expected)
        assert np.array_equal(whole.score(ASKED, SAID), expected) and whole.counts["retries"] == 0
        # both sides of an objective
        both = safety.Objective(HTTPScorer(reward_url), whole, 2.0)(SAID, request=ASKED)
        assert np.allclose(both, model.score(ASKED, SAID) - 2 * expected)


IDENTITY = {"name": "m", "weights": "w", "tokenizer": "t", "text": "beaver"}


@pytest.fixture
def scripted():
    """The address of a server, and the answers that it gives in turn before right ones."""
    script = []

    def reply(path, body, headers):
        if path == "/identity":
            return IDENTITY
        right = {"scores": [0.5] * len(body["prompts"]), "identity": fingerprint(IDENTITY), "truncated": 0}
        answer = script.pop(0) if script else {}
        if isinstance(answer, float):
            time.sleep(answer)
            return None
        if isinstance(answer, int):
            return answer, {"error": "busy"}
        return right | answer if isinstance(answer, dict) else answer

    with answering(reply) as url:
        yield url, script


BAD = {
    "malformed": [b"<html>", b"", b"[]", b"null", b"[" * 100_000, b'{"scores": [1, 2]}']
    + [{"scores": bad} for bad in ([1.0], [1.0, 2.0, 3.0], {"0": 1, "1": 2})]
    + [{"scores": [1.0, bad]} for bad in (math.nan, math.inf, None, "2", True, 10**400)]
    + [{"truncated": bad} for bad in (3, -1, "0")],
    "http": [500],
    "connection": [0.0],
    "timeout": [0.6],
}


@pytest.mark.parametrize("kind", BAD)
def test_an_answer_that_is_none_is_counted_and_asked_for_again(scripted, kind):
    url, script = scripted
    for answer in BAD[kind]:
        scorer = HTTPScorer(url, retries=1, timeout=0.3)
        script[:] = [answer] * 3
        with pytest.raises(ScorerError, match=r"\(2 requests\)"):
            scorer.score(["a", "b"], ["c", "d"])
        assert scorer.score(["a", "b"], ["c", "d"]).tolist() == [0.5, 0.5]
        assert scorer.counts == {"texts": 2, "truncated": 0, kind: 3, "retries": 2, "failed": 1}


def test_what_a_server_refuses_or_another_model_says_is_not_asked_again(scripted):
    url, script = scripted
    for answer, kind, error in (({"identity": "0" * 16}, "identity", ScorerGone), (422, "refused", ScorerError)):
        scorer = HTTPScorer(url)
        script[:] = [answer] * 3
        with pytest.raises(error, match=r"\(1 requests\)"):
            scorer.score(["a"], ["b"])
        assert scorer.counts[kind] == scorer.counts["failed"] == 1
        scored = Rewards(scorer, floor=-9.0)(["x"], ["y"], [[1]], {})  # the floor, counted; never zeros
        assert scored.rewards.tolist() == [-9.0] and scored.counts["exception"] == 1


@contextlib.contextmanager
def sending(parts):
    """Serve the bytes of `parts`, a function that returns them one by one, to every request; yields the address."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                threading.Thread(target=answer, args=listening.accept()[:1], daemon=True).start()

    def answer(connection) -> None:
        with connection, contextlib.suppress(OSError):  # the client gave up
            connection.recv(1 << 16)
            for part in parts():
                connection.sendall(part)

    threading.Thread(target=serve, daemon=True).start()
    with listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


OK, CHUNKED = b"HTTP/1.1 200 OK\r\n", b"Transfer-Encoding: chunked\r\n\r\n"
PACKED = gzip.compress(b" " * 10**8)


def slowly(head: bytes):
    yield head
    for _ in range(400):
        time.sleep(0.05)
        yield b"a"


ENDLESS = {
    "slow head": (lambda: slowly(OK + b"X: "), "timeout", "0.3 s"),
    "slow body": (lambda: slowly(OK + b"Content-Length: 9999\r\n\r\n"), "timeout", "0.3 s"),
    "endless": (lambda: itertools.chain([OK + CHUNKED], itertools.repeat(b"10000\r\n%b\r\n" % bytes(1 << 16))),
                "connection", "1 MB"),
    "packed": (lambda: [OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(PACKED) + PACKED],
               "connection", "gzip"),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "kind", "named"), ENDLESS.values(), ids=ENDLESS)
def test_no_answer_is_awaited_or_read_without_end(monkeypatch, parts, kind, named):
    monkeypatch.setattr(_bounded_http, "MOST", 1 << 20)
    with sending(parts) as url:
        start = time.monotonic()
        with pytest.raises(ScorerGone, match=named):
            HTTPScorer(url, retries=0, timeout=0.3)
        (answer,) = Endpoint("m", url, timeout=0.3, retries=0).answers([[{"role": "user", "content": "x"}]])
        assert answer.error == kind and named in answer.detail and time.monotonic() - start < 10


def test_an_error_shows_neither_the_key_nor_what_moves_a_terminal(monkeypatch):
    monkeypatch.setenv("SCORER_KEY", key := 'k-"1"\\9')
    told = {"name": "n", "weights": "w", "tokenizer": "t", "text": "x"}
    for said in ((500, f"{'x' * 280}Bearer {key}"), (500, {"detail": key}), told | {"name": f"\x1b[2J{key}"}, [key]):
        with answering(lambda *_, said=said: said) as url, pytest.raises(ScorerError) as error:
            HTTPScorer(url, retries=0, api_key_env="SCORER_KEY")
        shown = str(error.value)
        assert 'k-"' not in shown and "9" not in shown.partition("failure")[2] and shown.isprintable()


# ---------------------------------------------------------------------------------------------------------- the server


@pytest.fixture
def client(model, monkeypatch):
    monkeypatch.setattr(scoring_server, "MOST_TEXTS", 3)
    monkeypatch.setattr(scoring_server, "MOST_BYTES", 2000)
    with TestClient(app_of(model)) as found:
        yield found


def test_a_bad_request_is_told_what_is_wrong(client):
    for body, status, named in (
        (b"{", 422, "JSON"),
        (b'{"prompts": [1], "completions": ["y"]}', 422, "prompts.0"),
        (b'{"prompts": ["x"], "completions": ["y"], "model": "z"}', 422, "model"),
        (b'{"prompts": ["x", "x"], "completions": ["y"]}', 422, "2 prompts for 1"),
        (b'{"prompts": ["\\ud800"], "completions": ["y"]}', 422, ""),
        (b'{"prompts": ["\xff"], "completions": ["y"]}', 400, ""),
        (json.dumps({"prompts": ["x"] * 4, "completions": ["y"] * 4}).encode(), 413, "3 at most"),
        (json.dumps({"prompts": ["x"], "completions": ["secret " * 400]}).encode(), 413, "2000 at most"),
        (b'{"prompts": ' + b"[" * 1900, 400, ""),
        (iter([b'{"prompts": [], ', b'"completions": []}']), 411, "length"),
    ):
        answer = client.post("/score", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == status and list(answer.json()) == ["detail"], body
        assert named in answer.json()["detail"] and "secret" not in answer.text
    assert len(client.post("/score", json={"prompts": ["x"] * 3, "completions": ["y"] * 3}).json()["scores"]) == 3
    assert client.get("/score").status_code == 405 and client.get("/nothing").status_code == 404


@pytest.mark.filterwarnings("ignore:.*reads 30 tokens at most")  # in the server's thread
def test_what_is_cut_is_told(folders):
    logged, short = [], {"text": "continued", "max_length": 30}
    with running(app_of(RewardModel(folders["reward"], **short))) as url:
        scorer = HTTPScorer(url, batch_size=3)
        scorer(["x"] * 4, ["y" * 90, "y", "", "z" * 99], log_metric=lambda *metric: logged.append(metric))
    assert scorer.counts["truncated"] == 2 and logged == [("truncated", 0.5)]
    strict = RewardModel(folders["reward"], truncation="refuse", **short)
    with running(app_of(strict)) as url, pytest.raises(ScorerError, match="HTTP 422.* 30 tokens"):
        HTTPScorer(url).score(["x"], ["y" * 90])


def test_a_key(model, monkeypatch):
    with running(app_of(model, api_key="k-1")) as url:
        for key in ({}, {"api_key_env": "SCORER_KEY"}):
            monkeypatch.setenv("SCORER_KEY", "k-2")
            with pytest.raises(ScorerGone, match="^(?!.*k-2).*HTTP 401"):
                HTTPScorer(url, **key)
        monkeypatch.setenv("SCORER_KEY", "k-1")
        scorer = HTTPScorer(url, api_key_env="SCORER_KEY")
        assert len(scorer.score(["x"], ["y"])) == 1 and b"k-1" not in pickle.dumps(scorer)
        monkeypatch.delenv("SCORER_KEY")
        with pytest.raises(ValueError, match="SCORER_KEY"):
            scorer.score(["x"], ["y"])


def test_requests_wait_their_turn_and_a_model_that_fails_goes_on(model, monkeypatch):
    score, inside = model.score, threading.Semaphore(1)

    def slow(prompts, completions):
        assert inside.acquire(blocking=False)  # one request at a time
        time.sleep(0.05)
        inside.release()
        if prompts == ["fail"]:
            raise RuntimeError("CUDA out of memory: secret")
        return score(prompts, completions)

    expected = score(["x"], ["y"])[0]
    monkeypatch.setattr(model, "score", slow)
    with running(app_of(model)) as url, ThreadPoolExecutor(8) as pool:
        scorer = HTTPScorer(url, retries=0)
        for found in [pool.submit(scorer.score, ["x"] * 2, ["y"] * 2) for _ in range(4)]:
            assert np.allclose(found.result(), expected, atol=1e-6)
        failed = httpx.post(f"{url}/score", json={"prompts": ["fail"], "completions": ["y"]})
        assert failed.status_code == 500 and "secret" not in failed.text
        with monkeypatch.context() as patch:
            patch.setattr(model, "score", lambda *texts: np.array([math.nan]))
            failed = httpx.post(f"{url}/score", json={"prompts": ["x"], "completions": ["y"]})
        assert failed.status_code == 500 and "not finite" in failed.json()["detail"]
        assert len(scorer.score(["x"], ["y"])) == 1  # and goes on


def test_settings_that_cannot_be(model, folders, monkeypatch):
    folder = str(folders["reward"])
    for host in ("0.0.0.0", "::", "scorer.example"):
        with pytest.raises(ValueError, match=host):
            serve(folder, text="continued", host=host)
    for url in ("127.0.0.1:8100", "ftp://x", "http://", "http://me:secret@x", "http://x?key=secret", ""):
        with pytest.raises(ValueError, match="^url(?!.*secret)"):
            HTTPScorer(url)
    with pytest.raises(ValueError, match="api_key"):
        app_of(model, api_key="")
    for key in ("k-1\nk-2", "k-\u00e9", " "):  # no header can hold these
        monkeypatch.setenv("SCORER_KEY", key)
        for call, address in ((HTTPScorer, "http://x"), (serve, folder)):
            with pytest.raises(ValueError, match="(?s)^(?!.*k-).*SCORER_KEY"):
                call(address, api_key_env="SCORER_KEY")
