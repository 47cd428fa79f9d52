"""Transfers written down: what was moved and how long that took."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dasc.cache.counters import Counters
from dasc.cache.records import TransferKind, TransferRecord
from dasc.cache.storage import TensorStorage
from dasc.cache.transfers import Mover, StateStorage, ThreadMover, Ticket


class RecordingMover:
    """Has another mover do the work on a storage, and times it where it is done.

    Attributes:
        records: of completed transfers, in the order completed.
        counters: the cache's own, to tell a demotion from the storing of a request's state.

    Args:
        storage: to move in.
        mover_type: of the mover that decides when packs run.
        clock: seconds.
    """

    def __init__(
        self, storage: TensorStorage, mover_type: Callable[[StateStorage], Mover], clock: Callable[[], float]
    ) -> None:
        self.records: list[TransferRecord] = []
        self.counters = Counters()
        self._timed = _TimedStorage(storage, self.records, clock)
        self._mover = mover_type(self._timed)
        self._demotions = 0

    def pack(self, native_slot: int, compressed_slot: int) -> Ticket:
        """Start a pack."""
        demotions, self._demotions = self._demotions, self.counters.demotions
        self._timed.pack_kinds[compressed_slot] = "store" if demotions == self.counters.demotions else "demote"
        return self._mover.pack(native_slot, compressed_slot)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy native slots."""
        self._mover.copy(pairs)

    def load(self, compressed_slot: int, active_slot: int, position: int) -> None:
        """Restore a compressed slot."""
        self._mover.load(compressed_slot, active_slot, position)

    def clear(self, slots: Sequence[int]) -> None:
        """Zero native slots."""
        self._mover.clear(slots)

    def close(self) -> None:
        """End the background thread, if there is one; packs not yet begun fail."""
        if isinstance(self._mover, ThreadMover):
            self._mover.close()


class _TimedStorage:
    """``pack_kinds`` says of each pack under way, by its target, what it is."""

    def __init__(self, storage: TensorStorage, records: list[TransferRecord], clock: Callable[[], float]) -> None:
        self.pack_kinds: dict[int, TransferKind] = {}
        self._storage, self._records, self._clock = storage, records, clock

    def pack(self, native_slot: int, compressed_slot: int) -> None:
        started = self._clock()
        self._storage.pack(native_slot, compressed_slot)
        self._note(self.pack_kinds[compressed_slot], self._storage.compressed_slot_bytes, started)

    def load(self, compressed_slot: int, active_slot: int, position: int) -> None:
        started = self._clock()
        self._storage.load(compressed_slot, active_slot, position)
        self._note("load", self._storage.compressed_slot_bytes, started)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        started = self._clock()
        self._storage.copy(pairs)
        self._note("copy", len(pairs) * self._storage.native_slot_bytes, started)

    def clear(self, slots: Sequence[int]) -> None:
        self._storage.clear(slots)

    def _note(self, kind: TransferKind, size_bytes: int, started: float) -> None:
        self._records.append(TransferRecord(kind, size_bytes, self._clock() - started))
