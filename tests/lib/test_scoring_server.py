"""The scoring server and its client: a real process that is killed and comes back, hostile requests and answers."""

import contextlib
import json
import math
import multiprocessing
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import numpy as np
import pytest
import uvicorn
from fastapi.testclient import TestClient

from evoalign_lib import reward_models
from evoalign_lib.reward_models import HTTPScorer, RewardModel, ScorerError, fingerprint
from evoalign_lib.rewards import Rewards
from evoalign_lib.scoring_server import app_of, serve
from evoalign_lib.tasks import safety
from evoalign_lib.tiny import dialogues, scorers

ASKED = ["How do I mend a kettle?", "USER: ASSISTANT:", 'quote " and \\ and é', "x"] * 5
# Python 3.12 warns of forking a process with threads, which is what servers in this process are
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
SAID = ["Take a glue and mend the kettle.", "\nUSER: more?", "", "y" * 50, "\u2028\x00 �"] * 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A reward and a cost model with their tokenizer beside them, as users have them."""
    found = {}
    for side in scorers.SIDES:
        found[side] = tmp_path_factory.mktemp(side)
        shutil.copytree(scorers.folder("length 1") / side, found[side], dirs_exist_ok=True)
        dialogues.tokenizer().save_pretrained(found[side])
    return found


@pytest.fixture(scope="module")
def model(folders):
    return RewardModel(folders["reward"], text="continued")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(reward_models, "_FIRST_WAIT", 0.02)
    monkeypatch.setattr(reward_models, "_LONGEST_WAIT", 0.1)


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@contextlib.contextmanager
def running(app):
    """An application behind a real socket, in a thread of this process."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


# ----------------------------------------------------------------------------------------------------- a real process


@FORKS
@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back(folders, model):
    """The command's own process, killed while it scores; another takes its place, and no score is lost or made up."""
    port, expected = free_port(), RewardModel(folders["reward"], text="continued", batch_size=1).score(ASKED, SAID)
    url = f"http://127.0.0.1:{port}"
    settings = {"text": "continued", "port": port, "batch_size": 1}
    code = f"from evoalign_lib.scoring_server import serve; serve({str(folders['reward'])!r}, **{settings!r})"
    first = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert json.loads(first.stdout.readline()) == model.identity | {"name": folders["reward"].name}
        scorer = HTTPScorer(url, retries=300, batch_size=1)
        assert scorer.identity == model.identity and scorer.counts["failed"] == 0
        assert np.array_equal(scorer.score(ASKED, SAID), expected)
        calm = scorer.counts.copy()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(scorer.score, ASKED * 40, SAID * 40)
            while scorer.counts["texts"] < calm["texts"] + 30:
                time.sleep(0.001)
            first.send_signal(signal.SIGKILL)
            first.wait()
            while not scorer.counts["connection"]:
                time.sleep(0.001)
            assert not waiting.done()
            second = multiprocessing.get_context("fork").Process(
                target=serve, args=(str(folders["reward"]),), kwargs=settings
            )
            second.start()
            try:
                assert np.array_equal(waiting.result(60), np.tile(expected, 40))
            finally:
                second.terminate()
                second.join()
    finally:
        first.kill()
        first.wait()
        first.stdout.close()
    counts = scorer.counts
    assert counts["connection"] == counts["retries"] >= 1 and counts["failed"] == 0
    assert counts["texts"] == 41 * len(ASKED) and counts["malformed"] == counts["timeout"] == 0
    scorer.retries = 2
    with pytest.raises(ScorerError, match=r"gave no scores \(3 requests\), the last time: ConnectError"):
        scorer.score(["x"], ["y"])
    assert scorer.counts["failed"] == 1
    scored = Rewards(scorer, floor=-9.0)(["x"], ["y"], [[1]], {})  # the floor, counted; never zeros
    assert scored.rewards.tolist() == [-9.0] and scored.counts["exception"] == 1
    with pytest.raises(ScorerError, match="See whether evoalign serve-scorer runs there"):
        HTTPScorer(url, retries=0)


# ---------------------------------------------------------------------------------------------------------- the client


@FORKS
def test_over_http_scores_are_the_same_to_the_bit_in_every_process(folders, model):
    with running(app_of(model)) as reward_url, running(app_of(RewardModel(folders["cost"], text="continued"))) as url:
        local = RewardModel(folders["cost"], text="continued")
        expected = local.score(ASKED, SAID)
        scorer = HTTPScorer(url + "/", batch_size=7, weights=local.identity["weights"])
        assert scorer.score([], []).shape == (0,)
        assert np.allclose(scorer.score(ASKED, SAID), expected, atol=1e-6)  # other batches
        whole = HTTPScorer(url)
        assert np.array_equal(whole.score(ASKED, SAID), expected)
        assert np.array_equal(pickle.loads(pickle.dumps(whole)).score(ASKED, SAID), expected)
        with multiprocessing.get_context("fork").Pool(3) as pool:  # after the connection was opened
            for found in pool.starmap(whole.score, [(ASKED, SAID)] * 9):
                assert np.array_equal(found, expected)
        assert np.array_equal(whole.score(ASKED, SAID), expected)
        assert whole.counts["retries"] == 0
        # both sides of an objective, one of them here
        both = safety.Objective(HTTPScorer(reward_url), whole, 2.0)(SAID, request=ASKED)
        assert np.allclose(both, model.score(ASKED, SAID) - 2 * expected)
        with pytest.raises(ValueError, match=r"holds weights \w{16}, not 0123"):
            HTTPScorer(url, weights="0123")


class Scripted(BaseHTTPRequestHandler):
    """Gives the answers it is told to, in turn, then a right one."""

    identity = {"name": "m", "weights": "w", "tokenizer": "t", "text": "beaver"}
    script = []

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self._say(200, json.dumps(self.identity))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        right = {"scores": [0.5] * len(body["prompts"]), "identity": fingerprint(self.identity), "truncated": 0}
        if not self.script:
            return self._say(200, json.dumps(right))
        answer = self.script.pop(0)
        if isinstance(answer, float):
            time.sleep(answer)
            return None
        if isinstance(answer, int):
            return self._say(answer, '{"error": "busy"}')
        return self._say(200, answer if isinstance(answer, str) else json.dumps(right | answer))

    def _say(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def scripted():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    Scripted.script.clear()


BAD = {
    "malformed": ["<html>", "", "[]", "null", "[" * 100_000, '{"scores": [1, 2]}']
    + [{"scores": bad} for bad in ([1.0], [1.0, 2.0, 3.0], {"0": 1, "1": 2})]
    + [{"scores": [1.0, bad]} for bad in (math.nan, math.inf, None, "2", True)]
    + [{"truncated": bad} for bad in (3, -1, "0")],
    "http": [500, 503],
    "timeout": [1.0],
}


@pytest.mark.parametrize("kind", BAD)
def test_an_answer_that_is_none_is_counted_and_asked_for_again(scripted, kind):
    for answer in BAD[kind]:
        scorer = HTTPScorer(scripted, retries=1, timeout=0.3)
        Scripted.script[:] = [answer]
        assert scorer.score(["a", "b"], ["c", "d"]).tolist() == [0.5, 0.5]
        assert scorer.counts[kind] == scorer.counts["retries"] == 1 and scorer.counts["failed"] == 0
        Scripted.script[:] = [answer] * 2
        with pytest.raises(ScorerError, match=r"\(2 requests\)"):
            scorer.score(["a", "b"], ["c", "d"])
        assert scorer.counts[kind] == 3 and scorer.counts["failed"] == 1 and scorer.counts["texts"] == 2


def test_another_model_is_never_mixed_in(scripted):
    scorer = HTTPScorer(scripted)
    Scripted.script[:] = [{"identity": "0" * 16}]
    with pytest.raises(ScorerError, match=r"\(1 requests\), the last time: its model is '0000000000000000', it was"):
        scorer.score(["a"], ["b"])
    assert scorer.counts["identity"] == scorer.counts["failed"] == 1
    Scripted.script[:] = [422]
    with pytest.raises(ScorerError, match=r"\(1 requests\), the last time: HTTP 422: .*busy"):
        scorer.score(["a"], ["b"])


def test_an_address_that_is_none():
    for url in ("127.0.0.1:8100", "ftp://x", "http://", "http://me:secret@x", "http://x?key=secret", ""):
        with pytest.raises(ValueError, match="^url") as raised:
            HTTPScorer(url)
        assert "secret" not in str(raised.value)


# ---------------------------------------------------------------------------------------------------------- the server


@pytest.fixture(scope="module")
def client(model):
    with TestClient(app_of(model, most_texts=3, most_bytes=2000)) as found:
        yield found


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        (b"", 422, ""),
        (b"{", 422, "JSON"),
        (b"[1]", 422, ""),
        (b'{"prompts": ["x"]}', 422, "completions"),
        (b'{"prompts": "x", "completions": "y"}', 422, "prompts"),
        (b'{"prompts": [1], "completions": ["y"]}', 422, "prompts.0"),
        (b'{"prompts": ["x"], "completions": ["y"], "model": "z"}', 422, "model"),
        (b'{"prompts": ["x", "x"], "completions": ["y"]}', 422, "2 prompts for 1"),
        (b'{"prompts": ["\\ud800"], "completions": ["y"]}', 422, ""),
        (b'{"prompts": ["\xff"], "completions": ["y"]}', 400, ""),
        (json.dumps({"prompts": ["x"] * 4, "completions": ["y"] * 4}).encode(), 413, "3 at most"),
        (json.dumps({"prompts": ["x"], "completions": ["secret " * 400]}).encode(), 413, "2000 at most"),
        (b'{"prompts": ' + b"[" * 1900, 400, ""),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(client, body, status, named):
    answer = client.post("/score", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status and list(answer.json()) == ["error"]
    assert named in answer.json()["error"] and "secret" not in answer.text


def test_good_requests(client, model):
    assert client.get("/identity").json() == model.identity
    for n in (0, 1, 3):
        answer = client.post("/score", json={"prompts": ASKED[:n], "completions": SAID[:n]}).json()
        assert answer == {
            "scores": model.score(ASKED[:n], SAID[:n]).tolist(),
            "identity": fingerprint(model.identity),
            "truncated": 0,
        }
    assert client.get("/score").status_code == 405 and client.get("/nothing").status_code == 404
    chunks = client.post("/score", content=iter([b'{"prompts": [], ', b'"completions": []}']))
    assert chunks.status_code == 411 and "with its length" in chunks.json()["error"]


def test_a_body_in_chunks_does_not_pass_by_a_length_of_its_own(model):
    """HTTP lets chunks win over a stated length, which the gate would have looked at."""
    body = json.dumps({"prompts": ["x"], "completions": ["y" * 5000]}).encode()
    heads = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 10\r\n"
    with running(app_of(model, most_bytes=1000)) as url, socket.create_connection(("127.0.0.1", int(url[17:]))) as sent:
        sent.sendall(heads + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        assert sent.recv(1000)[:12] in (b"HTTP/1.1 411", b"HTTP/1.1 400")  # the gate, or a stricter web server


@pytest.mark.filterwarnings("ignore:.*reads 30 tokens at most")  # in the server's thread
def test_what_is_cut_is_told(folders):
    logged = []
    with running(app_of(RewardModel(folders["reward"], text="continued", max_length=30))) as url:
        scorer = HTTPScorer(url, batch_size=3)
        scorer(["x"] * 4, ["y" * 90, "y", "", "z" * 99], log_metric=lambda *metric: logged.append(metric))
        assert scorer.counts["truncated"] == 2 and logged == [("truncated", 0.5)]
    strict = RewardModel(folders["reward"], text="continued", max_length=30, truncation="refuse")
    with running(app_of(strict)) as url, pytest.raises(ScorerError, match="HTTP 422.*longer than 30 tokens"):
        HTTPScorer(url).score(["x"], ["y" * 90])


def test_a_key(model, monkeypatch):
    with running(app_of(model, api_key="k-1")) as url:
        with pytest.raises(ScorerError, match="HTTP 401.*api_key_env"):
            HTTPScorer(url)
        monkeypatch.setenv("SCORER_KEY", "k-2")
        with pytest.raises(ScorerError, match="HTTP 401") as raised:
            HTTPScorer(url, api_key_env="SCORER_KEY")
        assert "k-2" not in str(raised.value)
        monkeypatch.setenv("SCORER_KEY", "k-1")
        scorer = HTTPScorer(url, api_key_env="SCORER_KEY")
        assert len(scorer.score(["x"], ["y"])) == 1 and b"k-1" not in pickle.dumps(scorer)
        monkeypatch.delenv("SCORER_KEY")
        with pytest.raises(ValueError, match="set SCORER_KEY"):
            scorer.score(["x"], ["y"])


@pytest.mark.parametrize("key", ["k-1\nk-2", "k-\u00e9", " "])
def test_a_key_that_no_header_can_hold_is_not_shown(scripted, folders, monkeypatch, key):
    monkeypatch.setenv("SCORER_KEY", key)
    for call in (
        lambda: HTTPScorer(scripted, api_key_env="SCORER_KEY"),
        lambda: serve(str(folders["reward"]), text="continued", api_key_env="SCORER_KEY"),
    ):
        with pytest.raises(ValueError, match="SCORER_KEY") as raised:
            call()
        assert "k-" not in str(raised.value)


class Slow:
    """A model that scores one request at a time, or fails."""

    def __init__(self, model):
        self.identity, self.counts, self.model = model.identity, model.counts, model
        self._inside = threading.Semaphore(1)

    def score(self, prompts, completions):
        assert self._inside.acquire(blocking=False)  # one request at a time
        time.sleep(0.05)
        self._inside.release()
        if prompts == ["fail"]:
            raise RuntimeError("CUDA out of memory: secret")
        return self.model.score(prompts, completions)


def test_requests_wait_their_turn_and_a_model_that_fails_goes_on(model):
    with running(app_of(Slow(model))) as url, ThreadPoolExecutor(8) as pool:
        scorer, expected = HTTPScorer(url, retries=0), model.score(["x"], ["y"])[0]
        for found in [pool.submit(scorer.score, ["x"] * 2, ["y"] * 2) for _ in range(4)]:
            assert np.allclose(found.result(), expected, atol=1e-6)
        failed = httpx.post(f"{url}/score", json={"prompts": ["fail"], "completions": ["y"]})
        assert failed.status_code == 500 and "secret" not in failed.text and "see the server's log" in failed.text
        assert len(scorer.score(["x"], ["y"])) == 1  # and goes on


def test_settings_that_cannot_be(model, folders):
    for bad, named in (({"most_texts": 0}, "most_texts=0"), ({"api_key": ""}, "api_key")):
        with pytest.raises(ValueError, match=named):
            app_of(model, **bad)
    for host in ("0.0.0.0", "::", "scorer.example"):
        with pytest.raises(ValueError, match=host):
            serve(str(folders["reward"]), text="continued", host=host)
