"""A discrete-event simulation of a server around the very cache it would use.

Every request goes through :class:`~dasc.cache.prefix_cache.PrefixCache` as it would in an engine; only forward passes
and transfers are replaced by the time they take (:class:`~dasc.cache.simulation.cost_model.CostModel`). Events are
arrivals, ends of prefill passes, commits of packs and completions; between two of them a batch that only decodes is
advanced in one go.

The server: requests wait in one queue, first come, first served, and at most ``server_limit`` run. As long as prompts
are unfinished, each forward pass computes up to ``chunk_tokens`` of them, in order of admission; else, and also then
if ``mixed_passes``, a pass computes one token of every sequence that decodes. A chunk ends where its request is to be
checkpointed. KV for a whole answer is reserved at admission, so no running request is ever put back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dasc.cache.config import CacheConfig
from dasc.cache.records import RequestRecord, StepRecord, TransferRecord
from dasc.cache.simulation.arrivals import Arrivals
from dasc.cache.simulation.cost_model import CostModel
from dasc.cache.simulation.load import Load
from dasc.cache.simulation.server import Server


@dataclass(frozen=True)
class Serving:
    """How requests come and are served.

    Attributes:
        server_limit: requests that run at a time.
        concurrency: conversations under way at a time, each sending its next request when the last is answered (closed
            loop); ``None`` sends every request at its own time (open loop).
        time_scale: of the times in an open loop; 0.5 sends everything twice as fast.
        chunk_tokens: most prompt tokens of a forward pass.
        mixed_passes: sequences that decode go on during prefill. SGLang lets them wait unless told otherwise.
        two_pass_refresh: replay windows in a forward pass of their own instead of the request's prefill.
        collective: storage is balanced over ranks.

    Raises:
        ValueError: naming the field.
    """

    server_limit: int = 32
    concurrency: int | None = None
    time_scale: float = 1.0
    chunk_tokens: int = 8192
    mixed_passes: bool = False
    two_pass_refresh: bool = False
    collective: bool = False

    def __post_init__(self) -> None:
        for name in ("server_limit", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency must be >= 1, got {self.concurrency}")
        if not 0 < self.time_scale < float("inf"):
            raise ValueError(f"time_scale must be positive and finite, got {self.time_scale}")


@dataclass(frozen=True)
class Simulation:
    """What happened. Warm-up requests are in none of it.

    Attributes:
        requests: in order of completion; arrivals from the start of the measured part.
        seconds: simulated, from the start of the measured part to the last answer.
        counters: of the cache, as in :meth:`~dasc.cache.counters.Counters.as_dict`; its tokens are ids.
        moved_bytes: checkpoint bytes moved on the fullest rank, by kind of transfer.
        refresh_tokens: replayed.
        steps: forward passes, if recorded.
        transfers: if recorded.
    """

    requests: list[RequestRecord]
    seconds: float
    counters: dict[str, Any]
    moved_bytes: dict[str, int]
    refresh_tokens: int
    steps: list[StepRecord]
    transfers: list[TransferRecord]


def simulate(
    load: Load,
    config: CacheConfig,
    cost: CostModel,
    serving: Serving = Serving(),
    *,
    record: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> Simulation:
    """Serve ``load`` from an empty cache, first its warm-up, one request at a time.

    Args:
        config: of the cache. Its page is one id of the load; its policies are replaced by the load's; its
            ``refresh_window_tokens`` are what a compressed hit replays.
        record: keep every forward pass and transfer, as a measured run would.
        progress: called with the number of finished requests now and then.

    Raises:
        ValueError: for a load without requests, a page of more than one id, KV too small for the longest request
            (saying how much it takes), an open loop without times, or costs that let no time pass.
    """
    if config.page_size != 1:
        raise ValueError(f"a page of the simulated cache is one id of the load, got page_size {config.page_size}")
    if not load.requests:
        raise ValueError(f"load {load.name!r} has no requests")
    needed = max(len(r.prompt) + len(r.output) for r in (*load.warmup, *load.requests))
    if needed > config.kv_pages:
        tokens = load.tokens_per_id
        raise ValueError(f"KV for {config.kv_pages * tokens} tokens is too small: a request takes {needed * tokens}")
    if cost.forward_s(1, 1, 1, 1) <= 0 or cost.forward_s(0, 0, 1, 0) <= 0:
        raise ValueError("costs must give every forward pass some time: step_s, for one, must not be 0 with the others")
    server = Server(
        dataclasses.replace(config, policies=load.policies),
        cost,
        server_limit=serving.server_limit,
        chunk_tokens=serving.chunk_tokens,
        tokens_per_id=load.tokens_per_id,
        mixed_passes=serving.mixed_passes,
        two_pass_refresh=serving.two_pass_refresh,
        collective=serving.collective,
        record=record,
    )
    server.run(Arrivals(load.warmup, concurrency=1, start_s=0.0))
    start_s = server.origin_s = server.mover.now
    before = server.cache.counters.as_dict()
    warm_refresh = server.refresh_tokens
    for unmeasured in (server.finished, server.steps, server.mover.records, server.mover.moved_bytes):
        unmeasured.clear()
    arrivals = Arrivals(load.requests, concurrency=serving.concurrency, start_s=start_s, time_scale=serving.time_scale)
    server.run(arrivals, progress)
    return Simulation(
        requests=server.finished,
        seconds=max(r.arrival_s + r.e2e_s for r in server.finished),
        counters=_since(server.cache.counters.as_dict(), before),
        moved_bytes=dict(server.mover.moved_bytes),
        refresh_tokens=server.refresh_tokens - warm_refresh,
        steps=server.steps,
        transfers=server.mover.records,
    )


def _since(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """How much every counter, and every label of one, has grown."""
    return {
        name: {label: n - before[name].get(label, 0) for label, n in value.items()}
        if isinstance(value, dict)
        else value - before[name]
        for name, value in after.items()
    }
