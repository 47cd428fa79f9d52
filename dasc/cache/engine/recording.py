"""A mover that writes down what it moved and how long that took."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dasc.cache.records import TransferKind, TransferRecord
from dasc.cache.storage import TensorStorage
from dasc.cache.transfers import Mover, StateStorage, Ticket


class RecordingMover:
    """Times the work of a storage, wherever another mover has it done.

    Attributes:
        records: of completed transfers, in the order completed.

    Args:
        storage: does the work.
        mover_type: decides when; e.g. :class:`~dasc.cache.transfers.ThreadMover`.
        demotions: how many demotions the cache has started. A pack is a demotion when this has grown since the last
            one, and else stores a request's state.
        clock: seconds.
    """

    def __init__(
        self,
        storage: TensorStorage,
        mover_type: Callable[[StateStorage], Mover],
        demotions: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self.records: list[TransferRecord] = []
        self._mover = mover_type(_TimedStorage(self))
        self.storage, self.clock = storage, clock
        self._demotions, self._seen = demotions, 0
        self.pack_kinds: dict[int, TransferKind] = {}  # by target, which is one pack's until that is done

    def pack(self, native_slot: int, compressed_slot: int) -> Ticket:
        """Start a pack."""
        ...
