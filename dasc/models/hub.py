"""A model on the Hugging Face Hub, read by HTTP range requests. No shard is ever downloaded as a whole."""

from __future__ import annotations

import re
import threading
import time
from http import HTTPStatus
from typing import NoReturn
from urllib.parse import quote

from huggingface_hub import constants, hf_hub_url

# HTTPError is the base of every transport error: httpx's class in huggingface_hub 1, httpx2's in 2.
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, but not re-exported for type checkers
    build_hf_headers,
    hf_raise_for_status,
    http_backoff,
    http_stream_backoff,
    validate_repo_id,
)

from dasc.models.errors import CheckpointError

_COMMIT = re.compile("[0-9a-f]{40}")
_TRIES = 4
_WAIT_S = 1.0
_TIMEOUT_S = 30.0
_CREDENTIALS = "set HF_TOKEN or run `hf auth login` with a token that may read it, and accept its terms if it is gated"


def is_hub_id(model: str) -> bool:
    """Whether ``model`` has the form ``"org/name"`` that the Hub allows."""
    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return model.count("/") == 1


class HubSource:
    """One commit of a model repository.

    The token, given or found by huggingface_hub, goes to the Hub alone: the HTTP client drops it on a redirect to
    another origin, and no message holds it.

    Args:
        repo: ``"org/name"``.
        revision: branch, tag or commit; the default branch when ``None``.
        token: access token; huggingface_hub's own (``HF_TOKEN``, ``hf auth login``) when ``None``.
        endpoint: address of the Hub; huggingface_hub's own (``HF_ENDPOINT``) when ``None``.

    Raises:
        CheckpointError: for a repository or revision that is missing, closed to the token, or unreachable.
        ValueError: for a token that no HTTP header can hold.
    """

    first_bytes = 64 * 1024
    gap_bytes = 128 * 1024
    parallel = 8

    def __init__(self, repo: str, *, revision: str | None, token: str | None, endpoint: str | None) -> None:
        self.name = repo  # until the commit is known
        self.requests = 0
        self._repo = repo
        self._lock = threading.Lock()
        self._endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self._headers = build_hf_headers(token=token, library_name="dasc")
        authorization = self._headers.get("authorization", "")
        if not (authorization.isascii() and authorization.isprintable()):
            raise ValueError(
                "token must be of printable ASCII characters, got others; it is not shown here (it was given as an "
                "argument, in HF_TOKEN or to `hf auth login`)"
            )
        self._revision, self._files = self._commit(revision)
        self.name = f"{repo}@{self._revision}"

    def files(self) -> list[str]:
        return self._files

    def read_all(self, file: str, max_bytes: int) -> bytes:
        data, _ = self._fetch(file, 0, None, max_bytes)
        return data

    def read_start(self, file: str, length: int) -> tuple[bytes, int]:
        return self._fetch(file, 0, length, length)

    def read_range(self, file: str, start: int, end: int) -> bytes:
        data, size = self._fetch(file, start, end, end - start)
        if len(data) != end - start:
            raise CheckpointError(
                f"{self.name}/{file}: expected bytes {start} to {end}, found a file of only {size} bytes"
            )
        return data

    def _count_request(self) -> None:
        with self._lock:
            self.requests += 1

    def _commit(self, revision: str | None) -> tuple[str, list[str]]:
        """Commit hash and file names of a revision, so that all reads see one state of the repository."""
        url = f"{self._endpoint}/api/models/{self._repo}"
        where = self._repo
        if revision is not None:
            url += f"/revision/{quote(revision, safe='')}"
            where += f", revision {revision!r}"
        self._count_request()
        try:
            response = http_backoff(
                "GET", url, headers=self._headers, timeout=_TIMEOUT_S, max_retries=_TRIES - 1, base_wait_time=_WAIT_S
            )
            hf_raise_for_status(response)
            info = response.json()
            commit, files = info["sha"], [entry["rfilename"] for entry in info["siblings"]]
            if not all(isinstance(name, str) for name in (commit, *files)) or not _COMMIT.fullmatch(commit):
                raise TypeError("expected a commit hash and file names")
            return commit, sorted(files)
        except HfHubHTTPError as error:
            self._refused(where, error)
        except (HTTPError, OfflineModeIsEnabled) as error:
            self._unreachable(where, error)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{where}: expected the Hub's answer from {self._endpoint}, found something else"
            ) from error

    def _fetch(self, file: str, start: int, end: int | None, max_bytes: int) -> tuple[bytes, int]:
        """Bytes ``[start, end)`` of a file, fewer at its end, and its size; the whole file when ``end`` is ``None``.

        A connection that is cut is opened again where it stopped, a bounded number of times.
        """
        where = f"{self.name}/{file}"
        url = hf_hub_url(self._repo, file, revision=self._revision, endpoint=self._endpoint)
        data = bytearray()
        for tries_left in reversed(range(_TRIES)):
            # Compressed answers have no ranges.
            headers = {**self._headers, "Accept-Encoding": "identity"}
            if end is not None or data:
                headers["Range"] = f"bytes={start + len(data)}-{'' if end is None else end - 1}"
            self._count_request()
            try:
                with http_stream_backoff(
                    "GET",
                    url,
                    headers=headers,
                    timeout=_TIMEOUT_S,
                    max_retries=_TRIES - 1,
                    base_wait_time=_WAIT_S,
                    retry_on_exceptions=(),
                ) as response:
                    hf_raise_for_status(response)
                    if response.status_code == HTTPStatus.OK and end is None:
                        data.clear()  # the whole file, from its start
                        size = wanted = None
                    else:
                        size = self._ranged_size(
                            where, start + len(data), response.status_code, response.headers.get("Content-Range", "")
                        )
                        wanted = size if end is None else min(end, size) - start
                    for chunk in response.iter_bytes():
                        data += chunk
                        if len(data) > max_bytes:
                            raise CheckpointError(f"{where}: expected at most {max_bytes} bytes, found more")
                if wanted is None or len(data) == wanted:
                    return bytes(data), len(data) if size is None else size
                cut: Exception | None = None
            except HfHubHTTPError as error:
                self._refused(where, error)
            except OfflineModeIsEnabled as error:
                self._unreachable(where, error)
            except HTTPError as error:
                cut = error
            if tries_left:
                time.sleep(_WAIT_S)
        self._unreachable(where, cut)

    def _ranged_size(self, where: str, start: int, status: int, content_range: str) -> int:
        """The file's size, from the answer to a range request for bytes from ``start`` on."""
        if status != HTTPStatus.PARTIAL_CONTENT:
            raise CheckpointError(
                f"{where}: the server ignored a range request (answered {status}, not 206); "
                "whole shards are never downloaded: use a Hub that serves ranges, or a local copy"
            )
        found = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", content_range)
        if found is None or int(found[1]) != start:
            raise CheckpointError(f"{where}: expected bytes from {start} on, the server sent {content_range!r}")
        return int(found[3])

    def _refused(self, where: str, error: HfHubHTTPError) -> NoReturn:
        status = error.response.status_code
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            reason = f"not there, or closed to this token (HTTP {status}): {_CREDENTIALS}"
        elif status == HTTPStatus.NOT_FOUND:
            reason = "not found (HTTP 404)"
        elif status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            reason = "the file is shorter than expected (HTTP 416)"
        else:
            reason = f"the Hub answered HTTP {status}"
        raise CheckpointError(f"{where}: {reason}") from error

    def _unreachable(self, where: str, error: Exception | None) -> NoReturn:
        if isinstance(error, OfflineModeIsEnabled):
            reason = "not read, because HF_HUB_OFFLINE is set"
        else:
            why = f" ({type(error).__name__})" if error is not None else ""
            reason = f"no complete answer from {self._endpoint} in {_TRIES} tries{why}"
        raise CheckpointError(f"{where}: {reason}") from error
