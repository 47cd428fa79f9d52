"""What the cache did, in plain numbers. Nothing here decides anything."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import struct
from dataclasses import dataclass, field
from typing import TypeAlias

Labelled: TypeAlias = "collections.Counter[str]"


@dataclass(slots=True)
class Counters:
    """Counts since the start; they only grow. The label of each labelled count is in :data:`LABELS`.

    Attributes:
        requests: admitted requests.
        prompt_tokens: their prompt tokens.
        hits: admitted requests by tier of the state used (``dense``, ``compressed``) or ``miss``.
        hit_tokens: prompt tokens not computed again, by tier.
        unserved_kv_tokens: tokens that KV had but no state served (KV match minus usable).
        refresh_tokens: tokens replayed by compressed hits (DASC-WR).
        refresh_s: seconds of the replays, where they are apart from the requests' own forwards.
        refreshed_hits: compressed hits that were refreshed, by the form it took (``one_pass``, ``two_pass``).
        unrefreshed_hits: compressed hits that could not be refreshed; their omitted units became zero.
        failed_loads: states that could not be moved or cleared; the request is admitted, and counted, once more.
        stored: checkpoints stored, by what they became first (``compressed``, ``dense``).
        spills: finished requests that handed their native slot over because the compressed pool was full.
        demotions: dense checkpoints that pressure sent to the compressed tier, counted when they start.
        commits: packs completed, demotions and insertions alike.
        failed_packs: packs that failed or were cancelled and were rolled back.
        evictions: states dropped, by cause.
        evicted_kv_pages: KV pages given back by eviction and pruning.
        not_cached: checkpoints not stored, by reason.
        backpressure: times a request was told to wait, by resource (``native``, ``kv``); each try counts.
        unserved_junctions: requests whose placement policies take no checkpoint at the junction they met.
        forced_waits: allocations that could only be served by waiting for a pack.
        stall_s: seconds spent waiting for packs.
        clock_errors: waits that the clock measured as negative; they count as 0 s.
    """

    requests: int = 0
    prompt_tokens: int = 0
    hits: Labelled = field(default_factory=collections.Counter)
    hit_tokens: Labelled = field(default_factory=collections.Counter)
    unserved_kv_tokens: int = 0
    refresh_tokens: int = 0
    refresh_s: float = 0.0
    refreshed_hits: Labelled = field(default_factory=collections.Counter)
    unrefreshed_hits: int = 0
    failed_loads: int = 0
    stored: Labelled = field(default_factory=collections.Counter)
    spills: int = 0
    demotions: int = 0
    commits: int = 0
    failed_packs: int = 0
    evictions: Labelled = field(default_factory=collections.Counter)
    evicted_kv_pages: int = 0
    not_cached: Labelled = field(default_factory=collections.Counter)
    backpressure: Labelled = field(default_factory=collections.Counter)
    unserved_junctions: int = 0
    forced_waits: int = 0
    stall_s: float = 0.0
    clock_errors: int = 0

    def as_dict(self) -> dict[str, int | float | dict[str, int]]:
        """A copy, labelled counts as dictionaries."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}


LABELS = {
    "hits": "tier",
    "hit_tokens": "tier",
    "refreshed_hits": "form",
    "stored": "tier",
    "evictions": "cause",
    "not_cached": "reason",
    "backpressure": "resource",
}


class History:
    """A running hash over every choice of slot and victim, so that ranks can tell whether they still agree."""

    _pack = struct.Struct("<5q").pack

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def record(self, event: int, a: int, b: int = 0, c: int = 0, d: int = 0) -> None:
        """Add one choice."""
        self._hash.update(self._pack(event, a, b, c, d))

    def digest(self) -> str:
        """Hexadecimal digest of all choices so far; equal on two ranks only if all of them were equal."""
        return self._hash.copy().hexdigest()
