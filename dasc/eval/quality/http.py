"""A server spoken to by HTTP, with a bounded number of tries. The standard library is enough for that."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from dasc.eval.quality.backend import BackendError

T = TypeVar("T")

_PASSING = (408, 425, 429, 500, 502, 503, 504)
_LONGEST_MESSAGE = 300


@dataclass(frozen=True)
class Http:
    """Where a server is and how patient to be.

    Attributes:
        url: without a slash at its end.
        timeout_s: between two pieces of an answer.
        tries: of each request. Failures of the network, refusals for now and errors of the server are tried again.
        pause_s: before the second try; doubled before each one after.
        key: sent as a bearer token, if not empty.
    """

    url: str
    timeout_s: float = 600.0
    tries: int = 4
    pause_s: float = 1.0
    key: str = ""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {self.url!r}")
        object.__setattr__(self, "url", self.url.rstrip("/"))

    def get(self, path: str) -> str:
        """Text of an answer.

        Raises:
            BackendError: when there is none, saying why in one line.
        """
        return self._with_tries(path, None, lambda answer: b"".join(answer).decode(errors="replace"))

    def post(self, path: str, body: dict[str, Any], read: Callable[[Iterator[bytes]], T]) -> T:
        """What ``read`` makes of an answer's lines, which come as the server sends them.

        Raises:
            BackendError: as :meth:`get`; one that ``read`` raises goes on without another try.
        """
        return self._with_tries(path, json.dumps(body).encode(), read)

    def _with_tries(self, path: str, body: bytes | None, read: Callable[[Iterator[bytes]], T]) -> T:
        reason = ""
        for attempt in range(self.tries):
            if attempt:
                time.sleep(self.pause_s * 2 ** (attempt - 1))
            try:
                return self._once(path, body, read)
            except urllib.error.HTTPError as error:
                with error:
                    reason = f"status {error.code}: {_message(error.read())}"
                if error.code not in _PASSING:
                    break
            except urllib.error.URLError as error:
                reason = str(error.reason)
            except (OSError, http.client.HTTPException) as error:
                reason = str(error) or type(error).__name__
        raise BackendError(f"{self.url}{path} failed after {attempt + 1} tries: {reason}")

    def _once(self, path: str, body: bytes | None, read: Callable[[Iterator[bytes]], T]) -> T:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.url + path, body, headers)
        with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
            return read(iter(answer))


def _message(body: bytes) -> str:
    """What an error's body says: OpenAI's ``error.message``, or its text."""
    text = body.decode(errors="replace")
    try:
        values = json.loads(text)
        error = values.get("error", values)
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, AttributeError):
        pass
    return " ".join(text.split())[:_LONGEST_MESSAGE]
