"""A small server that answers as the Hub does: its API, files by byte ranges, redirects to another host, and faults."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Seen:
    path: str
    headers: dict[str, str]
    status: int = 0
    sent: int = 0


@dataclass
class FakeHub:
    """Serves one repository's folder. Attributes may be changed while it runs."""

    folder: Path
    repo: str = "org/model"
    revisions: tuple[str, ...] = ("main",)
    token: str | None = None  # the only one let in, when set
    forbidden: tuple[int, str] = (401, "RepoNotFound")  # status and X-Error-Code without it
    ignore_ranges: bool = False
    cdn: str | None = None  # where .safetensors are redirected to
    cut_after: int | None = None  # bytes of a .safetensors answer after which the connection is cut
    cuts: int = 0  # how many answers are cut
    failures: int = 0  # how many answers are 503
    missing: tuple[str, ...] = ()  # files that are listed, but answered 404
    content_range: str | None = None  # a lie
    most: int | None = None  # bytes of the longest range it sends at once
    api_body: bytes | None = None  # another answer of the API
    seen: list[Seen] = field(default_factory=list)

    def __enter__(self) -> FakeHub:
        hub, lock = self, Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                record = Seen(self.path, {key.lower(): value for key, value in self.headers.items()})
                with lock:
                    hub.seen.append(record)
                hub.answer(self, record, lock)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def files(self, suffix: str = "") -> list[Seen]:
        """Requests for files, in order."""
        return [seen for seen in self.seen if "/resolve/" in seen.path and seen.path.endswith(suffix)]

    def answer(self, handler: BaseHTTPRequestHandler, record: Seen, lock: Lock) -> None:
        def send(status: int, body: bytes = b"", **headers: str) -> None:
            record.status = status
            handler.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                handler.send_header(key.replace("_", "-"), value)
            handler.end_headers()
            handler.wfile.write(body)
            record.sent = len(body)

        if self.token is not None and record.headers.get("authorization") != f"Bearer {self.token}":
            return send(self.forbidden[0], X_Error_Code=self.forbidden[1])
        with lock:
            failing = self.failures > 0
            self.failures -= failing
        if failing:
            return send(503)
        found = re.fullmatch(r"/(?:api/models/)?([^/]+/[^/]+)(?:/(?:revision|resolve)/([^/]+)(?:/(.+))?)?", record.path)
        if found is None or found[1] != self.repo:
            return send(404, X_Error_Code="RepoNotFound")
        revision = None if found[2] is None else unquote(found[2])
        if revision not in (None, COMMIT, *self.revisions):
            return send(404, X_Error_Code="RevisionNotFound")
        if record.path.startswith("/api/"):
            names = [path.name for path in self.folder.iterdir()]
            info = {"id": self.repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            return send(200, json.dumps(info).encode() if self.api_body is None else self.api_body)
        path = self.folder / unquote(found[3])
        if path.name in self.missing or not path.is_file():
            return send(404, X_Error_Code="EntryNotFound")
        if self.cdn is not None and path.suffix == ".safetensors":
            return send(302, Location=f"{self.cdn}{handler.path}")
        self._send_file(handler, record, path, lock)

    def _send_file(self, handler: BaseHTTPRequestHandler, record: Seen, path: Path, lock: Lock) -> None:
        size = path.stat().st_size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", record.headers.get("range", ""))
        start, end, record.status = 0, size, 200
        if wanted and not self.ignore_ranges:
            start, end, record.status = int(wanted[1]), min(size, int(wanted[2] or size - 1) + 1), 206
            end = end if self.most is None else min(end, start + self.most)
            if start >= size:
                record.status, end = 416, start
        handler.send_response(record.status)
        handler.send_header("Content-Length", str(end - start))
        if record.status == 206:
            handler.send_header("Content-Range", self.content_range or f"bytes {start}-{end - 1}/{size}")
        handler.end_headers()
        cut = None
        with lock:
            if self.cut_after is not None and self.cuts > 0 and path.suffix in (".safetensors", ".json"):
                self.cuts -= 1
                cut = self.cut_after
        left = end - start if cut is None else min(cut, end - start)
        with open(path, "rb") as stream:
            stream.seek(start)
            try:
                while left:
                    chunk = stream.read(min(left, 65536))
                    handler.wfile.write(chunk)
                    record.sent += len(chunk)
                    left -= len(chunk)
            except OSError:  # the client has gone
                cut = 0
        if cut is not None:
            handler.close_connection = True
            handler.connection.close()
