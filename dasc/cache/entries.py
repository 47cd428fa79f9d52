"""A stored checkpoint, where it can be, and why one may not be stored."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dasc.cache.lru import LruHeap


class Tier(enum.Enum):
    """Where a checkpoint is. ``DEMOTING``: still served from its native slot while a pack runs."""

    DENSE = "dense"
    DEMOTING = "demoting"
    COMPRESSED = "compressed"
    ABSENT = "absent"


class NotCached(enum.Enum):
    """Why a checkpoint was not stored; the values are the reasons that counters and explanations use."""

    NO_ROOM = "no_room"
    TRANSFER_FAILED = "transfer_failed"
    OPTED_OUT = "opted_out"
    UNALIGNED = "unaligned"
    NO_STATE = "no_state"


@dataclass(eq=False, slots=True)
class StateEntry:
    """One stored checkpoint. Read it freely; only the store changes it.

    Attributes:
        serial: unique number, rising with age of creation.
        position: exact number of tokens the state has seen.
        tier: where it is now; ``ABSENT`` once dropped, for good.
        slot: native slot (``DENSE``, ``DEMOTING``), compressed slot (``COMPRESSED``), 0 (``ABSENT``); kept if locked.
        stamp: when it was last used, on the store's logical clock.
        locks: uses under way; above 0 it neither changes tier nor goes.
        owner: whatever the caller ties it to, such as a tree node.
        queue: the order of recency it stands in.
    """

    serial: int
    position: int
    tier: Tier
    slot: int
    stamp: int
    locks: int = 0
    owner: object | None = None
    queue: LruHeap[StateEntry] | None = None

    @property
    def pinned(self) -> bool:
        """A pack reads its native slot, which can be neither reused nor overwritten."""
        return self.tier is Tier.DEMOTING
