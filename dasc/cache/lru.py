"""A least-recently-used order in which looking up the oldest costs O(log n) and an access costs nothing."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Aged(Protocol):
    """What stands in an :class:`LruHeap`: ``stamp`` says when it was last used, ``serial`` breaks ties."""

    stamp: int
    serial: int
    queue: LruHeap | None  # type: ignore[type-arg]


Item = TypeVar("Item", bound=Aged)


class LruHeap(Generic[Item]):
    """Items by stamp, oldest first, of which only some are eligible at a time.

    An item's stamp may grow and its eligibility may change without telling the heap: a record is a lower bound that
    ``oldest`` puts right when it comes to the top. An item that *becomes* eligible must be pushed. An item stands in
    one heap at a time; its ``queue`` names it.

    Args:
        eligible: whether an item may be chosen now.
    """

    def __init__(self, eligible: Callable[[Item], bool]) -> None:
        self._eligible = eligible
        self._records: list[tuple[int, int, Item]] = []
        self._members = 0

    def __len__(self) -> int:
        """Records, live and stale."""
        return len(self._records)

    def push(self, item: Item) -> None:
        """Enter ``item`` unless it is in already. It must not stand in another heap."""
        if item.queue is self:
            return
        assert item.queue is None, "an item stands in one heap at a time"
        item.queue = self
        self._members += 1
        heapq.heappush(self._records, (item.stamp, item.serial, item))

    def discard(self, item: Item) -> None:
        """Take ``item`` out if it is in; its records go when they come up, or when half of all are stale."""
        if item.queue is not self:
            return
        item.queue = None
        self._members -= 1
        if len(self._records) > 2 * self._members + 64:
            current = {
                item.serial: (item.stamp, item.serial, item) for _, _, item in self._records if item.queue is self
            }
            self._records = list(current.values())
            heapq.heapify(self._records)

    def oldest(self) -> Item | None:
        """The eligible item with the lowest stamp, left in place; ``None`` when there is none."""
        records = self._records
        while records:
            stamp, serial, item = records[0]
            if item.queue is not self:
                heapq.heappop(records)
            elif not self._eligible(item):
                heapq.heappop(records)
                item.queue = None
                self._members -= 1
            elif item.stamp != stamp:
                heapq.heapreplace(records, (item.stamp, serial, item))
            else:
                return item
        return None

    def records(self) -> list[tuple[int, Item]]:
        """Every record as ``(stamp, item)``, for the integrity check."""
        return [(stamp, item) for stamp, _, item in self._records]
