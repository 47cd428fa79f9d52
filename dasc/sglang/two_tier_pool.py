"""Two tiers of checkpoints behind the interface of SGLang's INT8 pool: dense in native slots, compressed in their own.

SGLang's tree holds *handles*, one for each checkpoint for as long as it lives, whatever tier it is in and wherever it
moves. What is stored where, who moves and who goes is :class:`~dasc.cache.tiers.TwoTierStore`'s to say (appendix B.2).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dasc.cache.counters import Counters
from dasc.cache.entries import NotCached, StateEntry, Tier
from dasc.cache.pools import SlotPool
from dasc.cache.tiers import TwoTierStore
from dasc.cache.transfers import DONE, Ticket
from dasc.sglang.pool import CompressedPool

RUNNING = "a running request"
"""Owner of every native slot that SGLang has."""


@dataclass(frozen=True)
class TwoTierSettings:
    """What :class:`~dasc.cache.tiers.TwoTierStore` is told (see there), and the stream that forwards run on.

    Attributes:
        forward_stream: of a GPU.
    """

    counters: Counters
    dense_limit: int | None = None
    watermark: int = 0
    agree: Callable[[bool], bool] = lambda ok: ok
    forward_stream: torch.Stream | None = None


class TwoTierPool:
    """Checkpoints of one rank. Their handles are int64 tensors of one element, on the CPU: the host alone reads them.

    A handle is valid from the call that gave it until ``free`` or ``clear``.

    Attributes:
        num_slots: checkpoints that could be cached if nothing ran, in both tiers.
        native_slots: usable native slots.
        store: what is where; another one after ``clear``.
        counters: what was stored, loaded and dropped.
        locked_native: locked checkpoints in native slots, which no allocation can reclaim.
        device: of the slots.

    Args:
        mamba_pool: SGLang's pool of native states.
        compressed: the compressed slots. Their owners are noted here, not by its own allocator.
        settings: of the store.
        on_evict: called for each checkpoint that the store drops of its own accord, which the tree must do too.
    """

    def __init__(
        self,
        mamba_pool: Any,
        compressed: CompressedPool,
        settings: TwoTierSettings,
        on_evict: Callable[[StateEntry, str], None],
    ) -> None:
        self.native_slots: int = mamba_pool.size
        self.num_slots: int = self.native_slots + compressed.num_slots
        self.counters = settings.counters
        self.device: torch.device = mamba_pool.mamba_cache.temporal.device
        self._compressed = compressed
        compressed.counters = Counters()  # the store counts: a demotion is no store, a dense hit is a hit
        self._settings = settings
        self._on_evict = on_evict
        self._mover = _Mover(mamba_pool, compressed, self.device, settings.forward_stream)
        self._begin()

    def _begin(self) -> None:
        self._entries: dict[int, StateEntry] = {}
        self.locked_native = 0
        self.store = TwoTierStore(
            SlotPool("native", self.native_slots),
            SlotPool("compressed", self._compressed.num_slots),
            self._mover,
            dense_limit=self._settings.dense_limit,
            watermark=self._settings.watermark,
            on_evict=self._on_evict,
            counters=self.counters,
            agree=self._settings.agree,
        )

    # -- insertion ----------------------------------------------------------------------------------------------------

    def adopt(self, slot: Tensor, position: int) -> Tensor | None:
        """Make a checkpoint of a native slot that a request gives up, without a copy. ``compress`` it once inserted.

        Args:
            slot: one element; the checkpoint owns it now.
            position: tokens that the state has seen.

        Returns:
            The handle, or ``None`` when there is no room: the slot is still the request's.
        """
        return self._note(self.store.adopt(int(slot), RUNNING, position))

    def checkpoint(self, slot: Tensor, position: int) -> Tensor | None:
        """Store the state in a native slot that a request goes on with.

        Returns:
            The handle, or ``None`` when it could not be cached.
        """
        return self._note(self.store.checkpoint(int(slot), position))

    def _note(self, stored: StateEntry | NotCached) -> Tensor | None:
        if isinstance(stored, NotCached):
            self.counters.not_cached[stored.value] += 1
            return None
        self._entries[stored.serial] = stored
        return torch.tensor([stored.serial])

    def entry(self, handle: Tensor) -> StateEntry:
        """The checkpoint that a handle stands for."""
        return self._entries[int(handle)]

    def is_compressed(self, handle: Tensor) -> bool:
        """Whether a load of ``handle`` leaves units out. A lock keeps the answer true."""
        return self.entry(handle).tier is Tier.COMPRESSED

    def compress(self, handle: Tensor) -> None:
        """Compressed-first insertion of an adopted checkpoint. One that is in use already stays dense for now."""
        entry = self.entry(handle)
        if entry.locks == 0:
            self.store.compress(entry)

    # -- use ----------------------------------------------------------------------------------------------------------

    def lock(self, entry: StateEntry) -> None:
        """Keep a checkpoint where it is until ``unlock``."""
        self.store.lock(entry)
        self.locked_native += entry.tier is not Tier.COMPRESSED

    def unlock(self, entry: StateEntry) -> None:
        """Undo one ``lock``."""
        self.locked_native -= entry.tier is not Tier.COMPRESSED
        self.store.unlock(entry)

    def load_to_active(self, mamba_pool: Any, handles: Tensor, active_slots: Tensor) -> None:
        """Fill ``active_slots``: from dense checkpoints exactly, from compressed ones with what they retain.

        A checkpoint whose pack is under way is still served from its native slot.
        """
        entries = [self._entries[handle] for handle in handles.tolist()]
        assert all(entry.locks for entry in entries), "a hit is locked until it is loaded"
        compressed = [place for place, entry in enumerate(entries) if entry.tier is Tier.COMPRESSED]
        dense = [place for place, entry in enumerate(entries) if entry.tier is not Tier.COMPRESSED]
        loads: list[tuple[str, list[int], Callable[[Tensor, Tensor], None]]] = [
            ("compressed", compressed, functools.partial(self._compressed.load_to_active, mamba_pool)),
            ("dense", dense, mamba_pool.copy_from),
        ]
        for tier, places, load in loads:
            if places:
                sources = on_device([entries[place].slot for place in places], self.device)
                load(sources, active_slots[on_device(places, self.device)])
                self.counters.hits[tier] += len(places)

    # -- what SGLang asks ---------------------------------------------------------------------------------------------

    def free(self, handles: Tensor) -> None:
        """Forget checkpoints that the tree no longer has, and drop those that the store still has."""
        for handle in handles.tolist():
            entry = self._entries.pop(handle)
            if entry.tier is not Tier.ABSENT:
                self.store.evict(entry, "tree")

    def withdraw(self, handle: Tensor, *, copied: bool) -> None:
        """Drop a checkpoint that the tree had already, and count it as that alone.

        Args:
            copied: by ``checkpoint``, which counts it as stored; one that was adopted is when it is compressed.
        """
        if copied:
            self.counters.stored[self.entry(handle).tier.value] -= 1
        self.free(handle)
        self.counters.evictions["tree"] -= 1
        self.counters.not_cached["duplicate"] += 1

    def available_size(self) -> int:
        """Handles that stand for nothing. The others are all in the tree: SGLang checks that."""
        return self.num_slots - len(self._entries)

    def clear(self) -> None:
        """Forget everything, running requests too. Packs under way are waited for: their slots are used again."""
        for packing in [*self.store.packs.abandoned, *self.store.packs.under_way()]:
            with contextlib.suppress(Exception):
                packing.ticket.result()
        self._begin()

    def occupancy(self) -> dict[str, float]:
        """Present values by name. A slot that a pack is writing to is held."""
        held = self.store.compressed_count + len(self.store.packs)
        return {
            "compressed_slots": self._compressed.num_slots,
            "compressed_slots_held": held,
            "compressed_bytes": self.mem_usage_bytes(),
            "dense_checkpoints": self.store.dense_count,
            "native_slots": self.native_slots,
            "native_slots_free": self.store.native.free_slots,
        }

    def mem_usage_bytes(self) -> int:
        """Bytes of the compressed slots, the reserved one included. The native ones are SGLang's own."""
        return self._compressed.mem_usage_bytes()


class NativeSlots:
    """SGLang's allocator of native slots, some of which dense checkpoints have.

    Attributes:
        size: usable slots.
    """

    def __init__(self, pool: TwoTierPool) -> None:
        self.size = pool.native_slots
        self._pool = pool

    def available_size(self) -> int:
        """Slots that no running request has: free, or a dense checkpoint's."""
        store = self._pool.store
        return int(store.native.free_slots) + store.dense_count + len(store.packs)

    def schedulable_available_size(self) -> int:
        """Slots that ``alloc`` can hand out: those of locked checkpoints must wait."""
        return self.available_size() - self._pool.locked_native

    def alloc(self, need_size: int) -> Tensor | None:
        """``need_size`` slots, int64, or ``None`` and no change. Demotes and evicts checkpoints as needed."""
        if need_size > self.schedulable_available_size():
            return None
        slots = [self._pool.store.allocate(RUNNING) for _ in range(need_size)]
        assert None not in slots, "an unlocked checkpoint can always be reclaimed"
        return on_device(slots, self._pool.device)

    def free(self, free_index: Tensor) -> None:
        """Take slots back from running requests.

        Raises:
            ValueError: for a slot that no running request has.
        """
        for slot in free_index.tolist():
            self._pool.store.release(slot, RUNNING)

    def alloc_group_begin(self, num_reqs: int) -> None:
        """SGLang would allocate for its whole queue here. That must not cost a checkpoint."""

    def alloc_group_end(self) -> None:
        """Nothing to give back."""

    def clear(self) -> None:
        """Take all slots back; what the checkpoints among them held is gone."""
        self._pool.clear()


class _Mover:
    """Moves state data for the store. On a GPU packs run on a stream of their own, off the path of requests."""

    def __init__(
        self,
        mamba_pool: Any,
        compressed: CompressedPool,
        device: torch.device,
        forward_stream: torch.Stream | None,
    ) -> None:
        self._mamba_pool = mamba_pool
        self._compressed = compressed
        self._device = device
        self._forward_stream = forward_stream
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def pack(self, native_slot: int, compressed_slot: int) -> Ticket:
        """Begin to compress, after the forwards launched so far: one may still write the source or read the target."""
        if self._stream is None:
            self._pack(native_slot, compressed_slot)
            return DONE
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        if self._forward_stream is not None:
            self._stream.wait_stream(self._forward_stream)
        with self._stream:
            self._pack(native_slot, compressed_slot)
            return _Recorded(self._stream.record_event())

    def _pack(self, native_slot: int, compressed_slot: int) -> None:
        source, target = on_device([native_slot], self._device), on_device([compressed_slot], self._device)
        self._compressed.store_from_active(self._mamba_pool, source, target)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy native slots, ``(source, destination)`` each."""
        sources, destinations = zip(*pairs)
        self._mamba_pool.copy_from(on_device(sources, self._device), on_device(destinations, self._device))


class _Recorded:
    """A ticket for work that is over when an event is."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def result(self) -> None:
        self._event.synchronize()


def on_device(numbers: Sequence[int | None], device: torch.device) -> Tensor:
    """Slot numbers as an int64 tensor."""
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)
