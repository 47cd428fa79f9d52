"""A running OpenAI-compatible server as a backend. Its arm is how it was started.

Answers are streamed, so that there is a time to the first token. ``usage.prompt_tokens_details.cached_tokens`` says
what came from the cache: SGLang reports it with ``--enable-cache-report``, and without it nothing can be measured.
``/flush_cache`` empties the cache. ``/metrics``, where it is on, tells free slots, of dasc's compressed pool or else of
SGLang's own, and evictions of dasc's; SGLang by itself does not count those of states.

What a server keeps of measured requests is its own affair. A prompt that was warmed exactly hits only a state before
its last token: of token ids the last is left out of the warm request, but of text no part is known to be all tokens but
the last, so there the server must store states on the way (SGLang: ``--mamba-radix-cache-strategy extra_buffer``, or
prompts in chunks).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Literal

from dasc.eval.items import Text
from dasc.eval.quality.backend import BackendError, Query, Reply, Residency
from dasc.eval.quality.http import Http

Api = Literal["completions", "chat"]

FLUSH_TIMEOUT_S = 30
_METRICS_PAUSE_S = 1.2
"""dasc's metrics follow within a second."""
_METRICS_READS = 15
_INFO = (
    "version",
    "model_path",
    "tp_size",
    "dtype",
    "page_size",
    "chunked_prefill_size",
    "max_running_requests",
    "max_mamba_cache_size",
    "mamba_radix_cache_strategy",
    "mamba_ssm_dtype",
    "disable_overlap_schedule",
)
"""Of SGLang's ``/server_info``, what figures may depend on and what stays the same while the server runs."""


class ServerBackend:
    """Asks a server.

    Args:
        http: the server.
        api: of prompts that are text; token ids need ``completions``.
        model: name that the server knows; its first one when ``None``.

    Raises:
        BackendError: when it does not answer.
    """

    def __init__(self, http: Http, api: Api = "completions", model: str | None = None) -> None:
        self._http, self._api = http, api
        self.model = model or self._first_model()
        self._info = self._server_info()

    def _first_model(self) -> str:
        text = self._http.get("/v1/models")
        try:
            return str(json.loads(text)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise BackendError(f"{self._http.url}/v1/models names no model") from error

    def _optional_text(self, path: str) -> str | None:
        """What a route answers that not every server has."""
        try:
            return self._http.get(path)
        except BackendError:
            return None

    def _server_info(self) -> dict[str, Any]:
        try:
            values = json.loads(self._optional_text("/server_info") or "{}")
        except ValueError:
            return {}
        return values if isinstance(values, dict) else {}

    def flush(self) -> None:
        """Empty the cache, waiting for requests that are being retired."""
        self._http.get(f"/flush_cache?timeout={FLUSH_TIMEOUT_S}")

    def ask(self, queries: Sequence[Query], concurrency: int, on_reply: Callable[[], None]) -> list[Reply]:
        """A thread for each of ``concurrency`` clients; the first failure ends all of them."""
        pool = ThreadPoolExecutor(concurrency)
        try:
            futures = [pool.submit(self._ask, query) for query in queries]
            for future in as_completed(futures):
                future.result()
                on_reply()
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _ask(self, query: Query) -> Reply:
        is_text = isinstance(query.prompt, str)
        if not is_text and self._api == "chat":
            raise ValueError("prompts of token ids need the completions API, not chat")
        body = {
            "model": self.model,
            "max_tokens": query.max_new_tokens,
            "temperature": query.temperature,
            "top_p": 1.0,
            "seed": query.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._prompt(query),
        }
        path = "/v1/chat/completions" if self._api == "chat" else "/v1/completions"

        def read(lines: Iterator[bytes]) -> Reply:
            return _read_stream(query.name, lines, is_text, started)

        started = time.perf_counter()
        return self._http.post(path, body, read)

    def _prompt(self, query: Query) -> dict[str, Any]:
        if isinstance(query.prompt, str):
            if self._api == "chat":
                return {"messages": [{"role": "user", "content": query.prompt}]}
            return {"prompt": query.prompt}
        tokens = query.prompt[:-1] if query.repeated and len(query.prompt) > 1 else query.prompt
        return {"prompt": list(tokens), "return_token_ids": True}

    def residency(self) -> Residency:
        """From ``/metrics``, read until they stand still."""
        last = self._metrics()
        for _ in range(_METRICS_READS):
            if last is None:
                return Residency()
            time.sleep(_METRICS_PAUSE_S)
            now = self._metrics()
            if now == last:
                break
            last = now
        return last or Residency()

    def _metrics(self) -> Residency | None:
        text = self._optional_text("/metrics")
        if text is None:
            return None
        slots = _metric(text, "dasc_cache_compressed_slots")
        if slots is None:
            return Residency(_metric(text, "sglang:mamba_available_tokens"), None)
        held = _metric(text, "dasc_cache_compressed_slots_held") or 0
        return Residency(slots - held, _metric(text, "dasc_cache_evictions_total") or 0)

    def settings(self) -> dict[str, Any]:
        """What the server says of itself."""
        metrics = self._optional_text("/metrics") or ""
        slots = _metric(metrics, "dasc_cache_compressed_slots")
        told = {name: self._info[name] for name in _INFO if name in self._info}
        return {"api": self._api, "served_model": self.model, "compressed_slots": slots, **told}

    def close(self) -> None:
        """The server goes on."""


def _read_stream(name: str, lines: Iterator[bytes], is_text: bool, started: float) -> Reply:
    """One streamed answer: server-sent events, the last of them with the usage."""
    text, finish = "", None
    tokens: list[int] = []
    usage: dict[str, Any] | None = None
    ttft_s: float | None = None
    try:
        for line in lines:
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            event = json.loads(line[5:])
            if "error" in event:
                raise BackendError(f"request {name!r} failed: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                said = choice["delta"].get("content") if "delta" in choice else choice.get("text")
                ids = choice.get("token_ids") or []
                if ttft_s is None and (said or ids or choice.get("delta", {}).get("reasoning_content")):
                    ttft_s = time.perf_counter() - started
                text += said or ""
                tokens += ids
                finish = choice.get("finish_reason") or finish
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, BackendError):
            raise
        raise BackendError(f"request {name!r}: the stream cannot be read ({error!r})") from error
    if finish is None or usage is None:
        raise ConnectionError(f"the stream of request {name!r} ended early")  # to be tried again
    if finish == "abort":
        raise BackendError(f"request {name!r} was aborted by the server")
    details = usage.get("prompt_tokens_details")
    if not details or details.get("cached_tokens") is None:
        raise BackendError("the server does not report cached tokens: start SGLang with --enable-cache-report")
    if not is_text and not tokens:
        raise BackendError("the server does not return token ids, which prompts of token ids need")
    answer: Text = text if is_text else tuple(tokens)
    return Reply(name, answer, int(usage["prompt_tokens"]), int(details["cached_tokens"]), finish, ttft_s)


def _metric(text: str, name: str) -> int | None:
    """Sum over the labels of a metric, of rank 0 where ranks are told apart: all ranks decide alike."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)", text, re.MULTILINE)
    values = [float(value) for labels, value in found if 'tp_rank="' not in labels or 'tp_rank="0"' in labels]
    return int(sum(values)) if values else None
