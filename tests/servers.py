"""Real servers for tests, each in a thread of this process with its own address."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import uvicorn


@contextlib.contextmanager
def answering(reply):
    """Serve what `reply(path, body, headers)` returns, a value or (status, value), as JSON unless it is bytes.

    body: the request's body, read as JSON; None for a GET. A reply of None closes the connection. Yields the address.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # otherwise every answer waits 40 ms between head and body

        def do_GET(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"]))) if self.command == "POST" else None
            said = reply(self.path, body, self.headers)
            self.close_connection = said is None
            status, value = said if isinstance(said, tuple) else (200, said)
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client was killed or stopped waiting
                if said is not None:
                    self.send_response(status)
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def running(app, **how):
    """Serve an application and yield its address; how: further settings of uvicorn."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", **how))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def completion(text, finish_reason="stop", usage=(50, 10), **message) -> dict:
    """Return a chat completion in the form that servers send."""
    said = {"role": "assistant", "content": text} | message
    counts = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
    choice = {"index": 0, "finish_reason": finish_reason, "message": said}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": counts}
