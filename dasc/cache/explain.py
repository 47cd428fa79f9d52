"""Why a prompt was served no further: a small memory of what went, and the sentence made from it."""

from __future__ import annotations

import collections
from typing import NamedTuple

from dasc.cache.radix import TOKEN_BYTES

REASONS = {
    "dense_lru": "evicted: the oldest, a native slot was needed",
    "compressed_lru": "evicted: the oldest, its compressed slot was needed for a demotion",
    "room": "evicted: the oldest, to store a newer checkpoint",
    "kv": "evicted with its KV, which was the oldest when pages ran out",
    "pack_failed": "dropped: packing failed and dense checkpoints were at their limit",
    "flush": "flushed",
    "whole_prompt": "stored, but at least one token of a prompt must be computed",
    "opted_out": "never stored: the request asked not to be",
    "no_room": "never stored: every checkpoint was in use",
    "transfer_failed": "never stored: the transfer failed",
    "unaligned": "never stored: the request ended inside a page",
    "no_state": "never stored: no state had been computed",
    "aborted": "never stored: the request was aborted",
}


class Gone(NamedTuple):
    """A prefix that has no state, and why (a key of :data:`REASONS`)."""

    position: int
    prefix_hash: int
    cause: str


class GoneLog:
    """The last ``size`` prefixes that lost their state or never got one. Older ones are forgotten."""

    def __init__(self, size: int) -> None:
        self._records: collections.deque[Gone] = collections.deque(maxlen=size)

    def add(self, prefix: bytes, cause: str) -> None:
        """Remember why ``prefix`` has no state."""
        self._records.append(Gone(len(prefix) // TOKEN_BYTES, hash(prefix), cause))

    def __len__(self) -> int:
        return len(self._records)

    def along(self, key: bytes, above: int, limit: int) -> list[tuple[int, str]]:
        """``(position, cause)`` of remembered prefixes of ``key`` longer than ``above`` and at most ``limit`` tokens.

        The latest word on each position, shortest first.
        """
        hashes: dict[int, int] = {}
        latest: dict[int, str] = {}
        for gone in self._records:
            if above < gone.position <= limit:
                if gone.position not in hashes:
                    hashes[gone.position] = hash(key[: gone.position * TOKEN_BYTES])
                if hashes[gone.position] == gone.prefix_hash:
                    latest[gone.position] = gone.cause
        return sorted(latest.items())


class Explanation(NamedTuple):
    """How far a prompt would be served now, and why no further.

    Attributes:
        tokens: length of the prompt.
        kv_tokens: where the KV match ends.
        usable_tokens: where the deepest state is: the hit.
        tier: its tier, ``None`` without a hit.
        gone: ``(position, cause)`` of states beyond the hit that are known to be missing.
    """

    tokens: int
    kv_tokens: int
    usable_tokens: int
    tier: str | None
    gone: tuple[tuple[int, str], ...]

    def __str__(self) -> str:
        lines = [
            f"{self.usable_tokens} of {self.tokens} tokens can be reused" + (f" ({self.tier})." if self.tier else ".")
        ]
        if self.kv_tokens > self.usable_tokens:
            lines.append(
                f"KV matches up to {self.kv_tokens}, but no state is stored past {self.usable_tokens} (tombstone)."
            )
        elif self.kv_tokens == 0:
            lines.append("Nothing with this beginning is in the cache.")
        lines.extend(f"State at {position}: {REASONS.get(cause, cause)}." for position, cause in self.gone)
        if self.usable_tokens < self.tokens - 1 and not self.gone:
            lines.append("Beyond that, no state is known to have been stored.")
        return "\n".join(lines)
