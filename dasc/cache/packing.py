"""Packs under way: started in one order, waited for in the same, and never forgotten."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from dasc.cache.counters import Counters
from dasc.cache.entries import StateEntry
from dasc.cache.transfers import Settled, StoreMover, Ticket

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Packing:
    """A pack from a native slot to the compressed slot ``target``, for ``entry``."""

    entry: StateEntry
    target: int
    ticket: Ticket


class PackQueue:
    """The packs of one store. It moves no slot and no entry; :class:`~dasc.cache.tiers.TwoTierStore` does.

    Attributes:
        releasing: packs under way whose native slot comes free at their commit, since nothing locks their entry.
        abandoned: packs whose caller was interrupted; their targets may still be written.

    Args:
        mover: moves the data.
        counters: where failures and waits are counted.
        agree: turns this rank's outcome of a transfer into the one all ranks act on.
        clock: seconds.
    """

    def __init__(
        self, mover: StoreMover, counters: Counters, agree: Callable[[bool], bool], clock: Callable[[], float]
    ) -> None:
        self.releasing = 0
        self.abandoned: list[Packing] = []
        self._mover = mover
        self._counters = counters
        self._agree = agree
        self._clock = clock
        self._under_way: dict[int, Packing] = {}  # by entry serial, in the order started

    def __len__(self) -> int:
        """Packs under way."""
        return len(self._under_way)

    def under_way(self) -> list[Packing]:
        """Packs under way in the order started."""
        return list(self._under_way.values())

    def of(self, entry: StateEntry) -> Packing:
        """The pack of a pinned entry."""
        return self._under_way[entry.serial]

    def first_releasing(self) -> Packing:
        """The oldest pack whose entry is unlocked; there must be one."""
        return next(packing for packing in self._under_way.values() if packing.entry.locks == 0)

    def start(self, entry: StateEntry, target: int) -> None:
        """Begin packing an unlocked entry. One that cannot begin fails like any other, when it is waited for."""
        ticket = self._submit(entry.slot, target)
        self._under_way[entry.serial] = Packing(entry, target, ticket)
        self.releasing += 1

    def finish(self, packing: Packing) -> bool:
        """Wait for a pack of an unlocked entry and take it off the queue. Interrupted, it stays on it.

        Returns:
            Whether it succeeded, on all ranks.
        """
        ok = self._outcome(packing.ticket)
        del self._under_way[packing.entry.serial]
        self.releasing -= 1
        return ok

    def run(self, entry: StateEntry, native_slot: int, target: int) -> bool:
        """Pack and wait. Interrupted while waiting, the pack is kept among the abandoned.

        Returns:
            Whether it succeeded, on all ranks.
        """
        packing = Packing(entry, target, self._submit(native_slot, target))
        try:
            return self._outcome(packing.ticket)
        except BaseException:
            self.abandoned.append(packing)
            raise

    def has_abandoned(self, entry: StateEntry) -> bool:
        """Whether a pack for ``entry`` is among the abandoned."""
        return any(packing.entry is entry for packing in self.abandoned)

    def reap(self) -> list[Packing]:
        """Wait for the abandoned packs; nothing writes to their targets any more."""
        for packing in self.abandoned:
            self._wait(packing.ticket)
        reaped, self.abandoned = self.abandoned, []
        return reaped

    def _submit(self, native_slot: int, target: int) -> Ticket:
        try:
            return self._mover.pack(native_slot, target)
        except Exception as error:
            return Settled(error)

    def _outcome(self, ticket: Ticket) -> bool:
        ok = self._agree(self._wait(ticket))
        if not ok:
            self._counters.failed_packs += 1
        return ok

    def _wait(self, ticket: Ticket) -> bool:
        started = self._clock()
        try:
            ticket.result()
            ok = True
        except Exception:
            logger.warning("a pack failed; its source stays as it was", exc_info=True)
            ok = False
        waited = self._clock() - started
        if waited < 0:
            self._counters.clock_errors += 1
        else:
            self._counters.stall_s += waited
        return ok
