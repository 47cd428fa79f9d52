"""Who holds which slot: state slots one by one, and KV pages in runs. Plain integers, no data.

A number leaves a pool with ``alloc``, belongs to its owner until ``free``, and may change hands in between. Whatever
breaks that (freeing twice, freeing another's, freeing what the pool never had) raises and changes nothing.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class SlotAllocator(Protocol):
    """What the tier policy asks of a pool; :class:`SlotPool` is ours, a server's own allocator may stand in."""

    @property
    def free_slots(self) -> int:
        """Slots that ``alloc`` could hand out now."""

    def alloc(self, owner: object) -> int | None:
        """Hand a free slot to ``owner``, ``None`` when there is none."""

    def free(self, slot: int, owner: object) -> None:
        """Take ``slot`` back from ``owner``."""

    def transfer(self, slot: int, old: object, new: object) -> None:
        """Pass ``slot`` from ``old`` to ``new`` without touching what it holds."""


class SlotPool:
    """Slots ``1 .. slots``; slot 0 is reserved and never handed out (appendix C.1).

    The slot freed last is handed out first, so the sequence of slots depends only on the sequence of calls.

    Args:
        name: how errors call this pool.
        slots: usable slots, every one of which can be handed out.

    Raises:
        ValueError: for a negative number of slots.
    """

    def __init__(self, name: str, slots: int) -> None:
        if slots < 0:
            raise ValueError(f"slots of pool {name!r} must not be negative, got {slots}")
        self.name = name
        self.slots = slots
        self._free = list(range(slots, 0, -1))
        self._owners: list[object | None] = [None] * (slots + 1)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def held_slots(self) -> int:
        return self.slots - len(self._free)

    def alloc(self, owner: object) -> int | None:
        """Hand out a free slot. Mutates the pool; the slot is ``owner``'s until ``free`` or ``transfer``.

        Returns:
            The slot, or ``None`` when all are held.

        Raises:
            ValueError: when ``owner`` is ``None``.
        """
        if owner is None:
            raise ValueError(f"owner of a {self.name} slot must not be None")
        if not self._free:
            return None
        slot = self._free.pop()
        self._owners[slot] = owner
        return slot

    def owner_of(self, slot: int) -> object | None:
        """Who holds ``slot``, ``None`` when it is free.

        Raises:
            ValueError: for a slot this pool does not have.
        """
        if not 1 <= slot <= self.slots:
            raise ValueError(f"{self.name} slot must be in [1, {self.slots}], got {slot}")
        return self._owners[slot]

    def _check_owner(self, slot: int, owner: object) -> None:
        held_by = self.owner_of(slot)
        if held_by is None:
            raise ValueError(f"{self.name} slot {slot} is already free, {owner!r} cannot give it up")
        if held_by != owner:
            raise ValueError(f"{self.name} slot {slot} belongs to {held_by!r}, {owner!r} cannot give it up")

    def free(self, slot: int, owner: object) -> None:
        """Take a slot back. Mutates the pool; what the slot holds may be overwritten from now on.

        Raises:
            ValueError: for a slot the pool does not have, a free slot, or one that another owner holds.
        """
        self._check_owner(slot, owner)
        self._owners[slot] = None
        self._free.append(slot)

    def transfer(self, slot: int, old: object, new: object) -> None:
        """Give a held slot to another owner; nothing is copied.

        Raises:
            ValueError: as ``free`` does, and when ``new`` is ``None``.
        """
        if new is None:
            raise ValueError(f"new owner of {self.name} slot {slot} must not be None")
        self._check_owner(slot, old)
        self._owners[slot] = new

    def free_list(self) -> tuple[int, ...]:
        """The free slots, next one to be handed out last."""
        return tuple(self._free)


class PagePool:
    """KV pages ``0 .. pages - 1``, handed out in runs and written down as ``bytes`` of int32 page numbers.

    ``bytes`` slice and join fast and cost little in a tree node; ``numpy.frombuffer(run, numpy.int32)`` reads them.

    Args:
        pages: pages in all.
        page_size: tokens a page.

    Raises:
        ValueError: for a negative number of pages or a page without tokens.
    """

    ITEM_BYTES = 4

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 0 or page_size < 1:
            raise ValueError(f"pages must be >= 0 and page_size >= 1, got {pages} and {page_size}")
        self.pages = pages
        self.page_size = page_size
        self.free_pages = pages
        self._stack = bytearray(np.arange(pages - 1, -1, -1, dtype=np.int32).tobytes())
        self._held: NDArray[np.uint8] = np.zeros(pages, dtype=np.uint8)

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens take."""
        return -(-tokens // self.page_size)

    def alloc(self, pages: int) -> bytes | None:
        """Hand out ``pages`` pages, or ``None`` (and no change) when fewer are free.

        Raises:
            ValueError: for a negative number.
        """
        if pages < 0:
            raise ValueError(f"pages must not be negative, got {pages}")
        if pages > self.free_pages:
            return None
        self.free_pages -= pages
        top = self.free_pages * self.ITEM_BYTES
        run = bytes(self._stack[top:])
        del self._stack[top:]
        self._held[np.frombuffer(run, np.uint32)] = 1
        return run

    def free(self, run: bytes | bytearray) -> None:
        """Take pages back; a later ``alloc`` of as many hands out the same run.

        Raises:
            ValueError: when a page is not this pool's or is already free; nothing is freed then.
        """
        if not run:
            return
        ids = np.frombuffer(run, np.uint32)  # a negative number becomes one that is far too large
        try:
            held = self._held[ids]
        except IndexError as error:
            raise ValueError(f"KV pages must be in [0, {self.pages}): {error}") from error
        if b"\0" in held.tobytes():
            raise ValueError(f"KV page {int(ids[held == 0][0])} is already free")
        self._held[ids] = 0
        self._stack += run
        self.free_pages += ids.size

    def held_mask(self) -> NDArray[np.bool_]:
        """``[pages]`` bool, true where a page is handed out (a copy)."""
        return self._held.astype(np.bool_)
