"""The cache's mover in simulated time: it moves nothing, and says how long that would have taken."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from dasc.cache.config import CacheConfig
from dasc.cache.counters import Counters
from dasc.cache.records import TransferKind, TransferRecord
from dasc.cache.simulation.cost_model import CostModel
from dasc.cache.transfers import Ticket


class _Pack:
    """A pack on the background stream; waiting for it moves the clock to its end."""

    __slots__ = ("end_s", "mover")

    def __init__(self, mover: SimulatedMover, end_s: float) -> None:
        self.mover = mover
        self.end_s = end_s

    def result(self) -> None:
        self.mover.now = max(self.mover.now, self.end_s)


class SimulatedMover:
    """Holds the simulated clock. Loads and copies move it; packs run one after the other on a stream of their own.

    Attributes:
        now: simulated seconds; whoever simulates forward passes moves it on.
        counters: the cache's own, to tell a demotion from an insertion.
        moved_bytes: bytes of the fullest rank, by kind of transfer.
        records: one for each transfer when ``record`` is set.

    Args:
        config: of the cache, for the sizes of slots.
        cost: constants.
        collective: storage is balanced over ranks, so that each load and pack needs an all-to-all.
        record: keep records.
    """

    def __init__(self, config: CacheConfig, cost: CostModel, *, collective: bool = False, record: bool = False) -> None:
        self.now = 0.0
        self.counters = Counters()
        self.moved_bytes: collections.Counter[str] = collections.Counter()
        self.records: list[TransferRecord] = []
        self._cost = cost
        self._dense_bytes = config.native_slot_bytes
        self._compressed_bytes = config.compressed_slot_bytes
        self._collective_s = cost.collective_latency_s if collective else 0.0
        self._record = record
        self._stream_free_s = 0.0
        self._demotions = 0

    def clock(self) -> float:
        """Simulated seconds, for the cache's count of stalls."""
        return self.now

    def _account(self, kind: TransferKind, size_bytes: int, extra_s: float = 0.0) -> float:
        seconds = self._cost.transfer_s(kind, size_bytes) + extra_s
        self.moved_bytes[kind] += size_bytes
        if self._record:
            self.records.append(TransferRecord(kind, size_bytes, seconds))
        return seconds

    def pack(self, native_slot: int, compressed_slot: int) -> Ticket:
        """Queue a pack behind those before it."""
        kind: TransferKind = "store" if self.counters.demotions == self._demotions else "demote"
        self._demotions = self.counters.demotions
        seconds = self._account(kind, self._compressed_bytes, self._collective_s)
        self._stream_free_s = max(self._stream_free_s, self.now) + seconds
        return _Pack(self, self._stream_free_s)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """One batch of dense copies."""
        self.now += self._account("copy", len(pairs) * self._dense_bytes)

    def load(self, compressed_slot: int, active_slot: int, position: int) -> None:
        """One load of a compressed checkpoint."""
        self.now += self._account("load", self._compressed_bytes, self._collective_s)

    def clear(self, slots: Sequence[int]) -> None:
        """Free: clearing is part of the forward pass that follows."""
