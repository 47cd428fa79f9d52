"""The two-tier store of state checkpoints: who is stored where, who moves and who goes (section 4.4, appendix B.2).

Knows slots and recency, nothing of tokens or trees. Running requests and dense checkpoints share the native pool;
compressed checkpoints have a pool of their own; one order by last use spans both. The three arms are settings:

- dense: a compressed pool without slots;
- compressed-only: ``dense_limit=0`` (spill off);
- two-tier: both.

Every choice is a pure function of the calls made, never of time: a pack started in one step is committed at the next
:meth:`TwoTierStore.step`, in the order started, waiting for it if it must. So ranks that see the same requests hold the
same slots. Not thread-safe: one scheduler calls it.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable

from dasc.cache.counters import Counters, History
from dasc.cache.entries import NotCached, StateEntry, Tier
from dasc.cache.lru import LruHeap
from dasc.cache.packing import Packing, PackQueue
from dasc.cache.pools import SlotAllocator
from dasc.cache.transfers import StoreMover

logger = logging.getLogger(__name__)


class Event(enum.IntEnum):
    """What :class:`~dasc.cache.counters.History` records of the store."""

    ALLOCATE = 1
    RELEASE = 2
    ADOPT = 3
    CHECKPOINT = 4
    PACK = 5
    COMMIT = 6
    ROLL_BACK = 7
    EVICT = 8


class TwoTierStore:
    """Checkpoints in two tiers under one recency order. The attributes without underscore are for reading.

    Attributes:
        dense_count: dense checkpoints at rest.
        compressed_count: compressed checkpoints.
        queues: the order of recency of each tier at rest.
        packs: the packs under way.

    Args:
        native: pool of running states and dense checkpoints.
        compressed: pool of compressed checkpoints; without slots for the dense arm.
        mover: moves the data.
        dense_limit: most dense checkpoints kept at rest (packs under way are not counted); no limit of its own by
            default, 0 turns spilling off.
        watermark: native slots that ``step`` tries to keep free for running requests.
        on_evict: called with ``(entry, cause)`` after an entry has become ``ABSENT`` and its slot free.
        counters: where to count; a new set by default.
        history: where choices are recorded; a new one by default.
        agree: turns this rank's outcome of a transfer into the one all ranks act on (an all-reduce AND); asked once for
            each, in the same order on every rank. By default the rank decides alone.
        clock: seconds, for ``stall_s`` only.

    Raises:
        ValueError: for a negative limit or watermark.
    """

    def __init__(
        self,
        native: SlotAllocator,
        compressed: SlotAllocator,
        mover: StoreMover,
        *,
        dense_limit: int | None = None,
        watermark: int = 0,
        on_evict: Callable[[StateEntry, str], None] = lambda entry, cause: None,
        counters: Counters | None = None,
        history: History | None = None,
        agree: Callable[[bool], bool] = lambda ok: ok,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if watermark < 0 or (dense_limit is not None and dense_limit < 0):
            raise ValueError(f"watermark and dense_limit must not be negative, got {watermark} and {dense_limit}")
        self.native = native
        self.compressed = compressed
        self.mover = mover
        self.dense_limit = dense_limit
        self.watermark = watermark
        self.counters = Counters() if counters is None else counters
        self.history = History() if history is None else history
        self.dense_count = 0
        self.compressed_count = 0
        self._on_evict = on_evict
        self._agree = agree
        self._now = 0
        self._serial = 0
        self._dense: LruHeap[StateEntry] = LruHeap(lambda e: e.locks == 0 and e.tier is Tier.DENSE)
        self._compressed: LruHeap[StateEntry] = LruHeap(lambda e: e.locks == 0 and e.tier is Tier.COMPRESSED)
        self.queues = {Tier.DENSE: self._dense, Tier.COMPRESSED: self._compressed}
        self.packs = PackQueue(mover, self.counters, agree, clock)

    # -- running states -------------------------------------------------------------------------------------------

    def allocate(self, owner: object) -> int | None:
        """Hand ``owner`` a native slot, reclaiming one if need be. Mutates pools and entries.

        Starts or finishes demotions and evicts as appendix B.2 orders. A pack that fails meanwhile is rolled back, and
        then the oldest dense checkpoint is evicted instead.

        Returns:
            The slot, or ``None``: nothing eligible, the caller must wait (backpressure).
        """
        may_demote = True
        while (slot := self.native.alloc(owner)) is None:
            if self.packs.releasing == 0 and not self._reclaim_one(may_demote):
                return None
            if self.native.free_slots == 0:
                self.counters.forced_waits += 1
                may_demote = self._commit(self.packs.first_releasing())
        self.history.record(Event.ALLOCATE, slot)
        return slot

    def release(self, slot: int, owner: object) -> None:
        """Take back a running state's native slot.

        Raises:
            ValueError: unless ``owner`` holds it.
        """
        self.native.free(slot, owner)
        self.history.record(Event.RELEASE, slot)

    # -- insertion ------------------------------------------------------------------------------------------------

    def adopt(self, slot: int, owner: object, position: int) -> StateEntry | NotCached:
        """Turn a finished request's active slot into a dense checkpoint, without a copy. Call ``compress`` on it next.

        Makes room by evicting the oldest eligible checkpoint only when neither the compressed pool nor ``dense_limit``
        leaves any.

        Returns:
            The entry, which owns the slot now, or ``NO_ROOM``, and then ``owner`` still holds the slot.

        Raises:
            ValueError: unless ``owner`` holds the slot and ``position`` is positive.
        """
        _check_position(position)
        if not self.compressed.free_slots and not self._dense_room() and not self._evict_oldest("room"):
            return NotCached.NO_ROOM
        entry = self._new_entry(position, Tier.DENSE, slot)
        self.native.transfer(slot, owner, entry)
        self.dense_count += 1
        self._dense.push(entry)
        self.history.record(Event.ADOPT, entry.serial, position, slot)
        return entry

    def compress(self, entry: StateEntry) -> None:
        """Compressed-first insertion: start packing an adopted entry if a compressed slot is free, else let it spill.

        A failed pack leaves it dense, or drops it when ``dense_limit`` has no room for it.

        Raises:
            ValueError: unless the entry is dense and unlocked.
        """
        if entry.tier is not Tier.DENSE or entry.locks:
            raise ValueError(f"entry must be dense and unlocked, got {entry.tier.value} with {entry.locks} locks")
        if self.compressed.free_slots:
            self.counters.stored["compressed"] += 1
            self._start_pack(entry)
        else:
            self.counters.stored["dense"] += 1
            self.counters.spills += 1

    def checkpoint(self, active_slot: int, position: int) -> StateEntry | NotCached:
        """Store a running request's state; its slot stays the request's. The transfer is complete on return.

        Takes, in this order: a free compressed slot; a free native slot above the watermark; the place of the oldest
        eligible checkpoint of either tier.

        Returns:
            The entry, or ``NO_ROOM`` or ``TRANSFER_FAILED``.

        Raises:
            ValueError: unless ``position`` is positive.
        """
        _check_position(position)
        spare_native = self.native.free_slots > self.watermark and self._dense_room()
        if not self.compressed.free_slots and not spare_native and not self._evict_oldest("room"):
            return NotCached.NO_ROOM
        dense = self.compressed.free_slots == 0
        entry = self._new_entry(position, Tier.DENSE if dense else Tier.COMPRESSED, 0)
        pool = self.native if dense else self.compressed
        slot = pool.alloc(entry)
        assert slot is not None, "room was made"
        entry.slot = slot
        try:
            stored = self._copy_now(entry, active_slot) if dense else self.packs.run(entry, active_slot, slot)
        except BaseException:
            if not self.packs.has_abandoned(entry):  # else its target may still be written; ``step`` frees it
                pool.free(slot, entry)
            raise
        self.history.record(Event.CHECKPOINT, entry.serial, position, slot, stored)
        if not stored:
            pool.free(slot, entry)
            entry.tier, entry.slot = Tier.ABSENT, 0
            return NotCached.TRANSFER_FAILED
        self.counters.stored[entry.tier.value] += 1
        if dense:
            self.dense_count += 1
            self._dense.push(entry)
        else:
            self.compressed_count += 1
            self._compressed.push(entry)
        return entry

    def _dense_room(self) -> bool:
        return self.dense_limit is None or self.dense_count < self.dense_limit

    def _new_entry(self, position: int, tier: Tier, slot: int) -> StateEntry:
        self._serial += 1
        self._now += 1
        return StateEntry(self._serial, position, tier, slot, stamp=self._now)

    def _copy_now(self, entry: StateEntry, active_slot: int) -> bool:
        try:
            self.mover.copy([(active_slot, entry.slot)])
            ok = True
        except Exception:
            logger.warning("copying native slot %d failed", active_slot, exc_info=True)
            ok = False
        return self._agree(ok)

    # -- use ------------------------------------------------------------------------------------------------------

    def touch(self, entry: StateEntry) -> None:
        """Record a use: the entry becomes the youngest. No other entry is affected."""
        self._now += 1
        entry.stamp = self._now

    def lock(self, entry: StateEntry) -> None:
        """Hold an entry where it is: tier and slot stay until ``unlock``.

        Raises:
            ValueError: when it is gone.
        """
        if entry.tier is Tier.ABSENT:
            raise ValueError(f"entry {entry.serial} is gone and cannot be locked")
        if entry.locks == 0 and entry.pinned:
            self.packs.releasing -= 1
        entry.locks += 1

    def unlock(self, entry: StateEntry) -> None:
        """Undo one ``lock``.

        Raises:
            ValueError: without a ``lock``.
        """
        if entry.locks == 0:
            raise ValueError(f"entry {entry.serial} is not locked")
        entry.locks -= 1
        if entry.locks:
            return
        if entry.tier is Tier.DENSE:
            self._dense.push(entry)
        elif entry.tier is Tier.COMPRESSED:
            self._compressed.push(entry)
        else:
            self.packs.releasing += 1

    # -- reclamation ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Begin a scheduler step: commit the packs of earlier steps in order, then reclaim down to the watermark.

        A pack whose entry is locked waits for a later step. Mutates entries and pools; native slots come free here.
        """
        for packing in self.packs.reap():
            self.compressed.free(packing.target, packing.entry)
        self.settle()
        self.reclaim(self.watermark)

    def settle(self) -> None:
        """Commit every pack whose entry is unlocked, in the order started, waiting for each."""
        for packing in self.packs.under_way():
            if packing.entry.locks == 0:
                self._commit(packing)

    def reclaim(self, slots: int) -> bool:
        """Start freeing native slots until ``slots`` are free or will be at the next commit.

        Returns:
            Whether that many are; ``False`` is backpressure.
        """
        while self.native.free_slots + self.packs.releasing < slots:
            if not self._reclaim_one(may_demote=True):
                return False
        return True

    def oldest(self) -> StateEntry | None:
        """The least recently used unlocked, unpinned entry of either tier."""
        dense, compressed = self._dense.oldest(), self._compressed.oldest()
        if dense is None or compressed is None:
            return dense or compressed
        return dense if dense.stamp < compressed.stamp else compressed

    def evict(self, entry: StateEntry, cause: str) -> None:
        """Drop an entry and free its slot; a pack of it under way is waited for and committed first.

        Raises:
            ValueError: when it is locked or gone.
        """
        if entry.locks or entry.tier is Tier.ABSENT:
            raise ValueError(f"entry {entry.serial} cannot be evicted: {entry.tier.value} with {entry.locks} locks")
        if entry.pinned:
            self._commit(self.packs.of(entry))
        if entry.tier is Tier.DENSE:
            self.native.free(entry.slot, entry)
            self._dense.discard(entry)
            self.dense_count -= 1
        elif entry.tier is Tier.COMPRESSED:
            self.compressed.free(entry.slot, entry)
            self._compressed.discard(entry)
            self.compressed_count -= 1
        else:  # its pack failed and it could not stay dense
            return
        self.history.record(Event.EVICT, entry.serial, entry.slot)
        entry.tier, entry.slot = Tier.ABSENT, 0
        self.counters.evictions[cause] += 1
        self._on_evict(entry, cause)

    def _reclaim_one(self, may_demote: bool) -> bool:
        """The three cases of appendix B.2. Frees a native slot now, or starts to; ``False`` when nothing can."""
        dense = self._dense.oldest()
        if dense is None:
            return False  # evicting a compressed entry frees no native slot
        if may_demote and not self.compressed.free_slots:
            compressed = self._compressed.oldest()
            if compressed is not None and compressed.stamp < dense.stamp:
                self.evict(compressed, "compressed_lru")
        if may_demote and self.compressed.free_slots:
            self.counters.demotions += 1
            self._start_pack(dense)
        else:
            self.evict(dense, "dense_lru")
        return True

    def _evict_oldest(self, cause: str) -> bool:
        entry = self.oldest()
        if entry is not None:
            self.evict(entry, cause)
        return entry is not None

    # -- demotion -------------------------------------------------------------------------------------------------

    def _start_pack(self, entry: StateEntry) -> None:
        target = self.compressed.alloc(entry)
        assert target is not None, "the caller saw a free compressed slot"
        self._dense.discard(entry)
        self.dense_count -= 1
        entry.tier = Tier.DEMOTING
        self.history.record(Event.PACK, entry.serial, entry.slot, target)
        try:
            self.packs.start(entry, target)
        except BaseException:
            self._roll_back(entry, target)
            raise

    def _commit(self, packing: Packing) -> bool:
        """Wait for a pack; move its entry to the compressed tier, or roll back. Interrupted, it stays under way."""
        entry = packing.entry
        if not self.packs.finish(packing):
            self._roll_back(entry, packing.target)
            return False
        self.native.free(entry.slot, entry)
        self.history.record(Event.COMMIT, entry.serial, entry.slot, packing.target)
        entry.tier, entry.slot = Tier.COMPRESSED, packing.target
        self.compressed_count += 1
        self._compressed.push(entry)
        self.counters.commits += 1
        return True

    def _roll_back(self, entry: StateEntry, target: int) -> None:
        self.compressed.free(target, entry)
        self.history.record(Event.ROLL_BACK, entry.serial, entry.slot, target)
        room = self._dense_room()
        entry.tier = Tier.DENSE
        self.dense_count += 1
        self._dense.push(entry)
        if not room:
            self.evict(entry, "pack_failed")


def _check_position(position: int) -> None:
    if position < 1:
        raise ValueError(f"position must be a positive number of tokens, got {position}")
