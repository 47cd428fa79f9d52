"""A small local server that speaks as much of OpenAI's and SGLang's HTTP as an evaluation needs. A word is a token."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer:
    """What the server is told to do, and what it was asked.

    Attributes:
        url: where it is.
        bodies: of requests for answers, in the order they came.
        flushes: so far.
        failures: statuses to answer the next requests for answers with; ``"cut"`` ends a stream early.
        cache_report: whether usage tells cached tokens.
        metrics: text of ``/metrics``; ``None`` for no such route.
        info: answer of ``/server_info``; ``None`` for no such route.
        token: how the key must be.
        most_at_once: requests that were answered at the same time.
    """

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.flushes = 0
        self.failures: list[int | str] = []
        self.cache_report = True
        self.metrics: str | None = None
        self.info: dict[str, Any] | None = {"version": "0.5.23", "model_path": "m", "startup_time": 3.0}
        self.token = ""
        self.most_at_once = 0
        self.lock = threading.Lock()
        self._now = 0
        self._cached: list[list[Any]] = []

    def get(self, path: str) -> tuple[int, str]:
        """Status and text."""
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "org/the-model"}]})
        if path.startswith("/flush_cache?timeout="):
            with self.lock:
                self.flushes += 1
                self._cached = []
            return 200, "flushed"
        optional = {"/metrics": self.metrics, "/server_info": None if self.info is None else json.dumps(self.info)}
        text = optional.get(path)
        return (404, "not found") if text is None else (200, text)

    def answer(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a stream: the answer is ``yes`` and how many tokens of the prompt were cached."""
        chat = path == "/v1/chat/completions"
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        tokens = prompt.split() if isinstance(prompt, str) else prompt
        with self.lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            cached = max((len(c) for c in self._cached if c == tokens[: len(c)] and len(c) < len(tokens)), default=0)
            self._cached.append(tokens)
        for text in ("", "yes", f" {cached}"):
            delta = {"delta": {"content": text}} if chat else {"text": text}
            ids = {"token_ids": [7] if text else []} if body.get("return_token_ids") else {}
            yield {"choices": [{"index": 0, **delta, **ids, "finish_reason": None}], "usage": None}
        yield {"choices": [{"index": 0, "text": "", "delta": {}, "finish_reason": "stop"}]}
        details = {"cached_tokens": cached} if self.cache_report else None
        yield {"choices": [], "usage": {"prompt_tokens": len(tokens), "prompt_tokens_details": details}}
        with self.lock:
            self._now -= 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"  # the end of an answer is the end of the connection

    def do_GET(self) -> None:
        self._send(*self.server.fake.get(self.path))

    def do_POST(self) -> None:
        fake: FakeServer = self.server.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with fake.lock:
            fake.bodies.append(body)
            failure = fake.failures.pop(0) if fake.failures else None
        if fake.token and self.headers["Authorization"] != f"Bearer {fake.token}":
            return self._send(401, json.dumps({"error": {"message": "no such key"}}))
        if isinstance(failure, int):
            return self._send(failure, json.dumps({"error": {"message": f"refused\nwith {failure}"}}))
        self.send_response(200)
        self.end_headers()
        for event in fake.answer(self.path, body):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            if failure == "cut":
                return None
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """A server that runs."""
    fake = FakeServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.fake = fake
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
