"""How the cache moves state data: by slot numbers, through one small interface.

The cache never sees a tensor. Whoever owns them implements :class:`StateStorage`; a *mover* decides when its work runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol


class TransferError(RuntimeError):
    """A transfer did not complete; its destination holds nothing that may be read."""


class Ticket(Protocol):
    """A pack under way. ``concurrent.futures.Future`` is one."""

    def result(self) -> object:
        """Wait for the pack; return when it is complete, raise an ``Exception`` when it failed or was cancelled.

        May be called again, also after a wait that was interrupted.
        """


class StateStorage(Protocol):
    """Owner of the native and the compressed buffers. Every call does its work before it returns.

    A call that raises may have written part of its destination; the cache then treats the destination as empty.
    """

    def pack(self, native_slot: int, compressed_slot: int) -> None:
        """Compress what ``native_slot`` holds (temporal, convolution, side state) into ``compressed_slot``."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy native slots exactly, ``(source, destination)`` each, all parts of the state."""

    def load(self, compressed_slot: int, active_slot: int, position: int) -> None:
        """Restore a compressed checkpoint taken after ``position`` tokens into a native slot, every part of it."""

    def clear(self, slots: Sequence[int]) -> None:
        """Zero native slots for requests that start from nothing."""


class StoreMover(Protocol):
    """What the two-tier store calls. ``pack`` may return before the work is done; ``copy`` may not.

    A slot that is a source stays untouched, and one that is a destination unread, until the ticket has its result.
    """

    def pack(self, native_slot: int, compressed_slot: int) -> Ticket:
        """Start :meth:`StateStorage.pack`."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """:meth:`StateStorage.copy`."""


class Mover(StoreMover, Protocol):
    """What the whole cache calls."""

    def load(self, compressed_slot: int, active_slot: int, position: int) -> None:
        """:meth:`StateStorage.load`."""

    def clear(self, slots: Sequence[int]) -> None:
        """:meth:`StateStorage.clear`."""


class Settled:
    """A ticket whose outcome is known: done, or failed with ``error``."""

    __slots__ = ("error",)

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def result(self) -> None:
        """Return at once, or raise the error.

        Raises:
            Exception: ``error``, when there is one.
        """
        if self.error is not None:
            raise self.error


DONE = Settled()


class InlineMover:
    """Packs in the caller's thread."""

    def __init__(self, storage: StateStorage) -> None:
        self.copy = storage.copy
        self.load = storage.load
        self.clear = storage.clear
        self._pack = storage.pack

    def pack(self, native_slot: int, compressed_slot: int) -> Ticket:
        """Pack now; a failure is kept for whoever asks the ticket."""
        try:
            self._pack(native_slot, compressed_slot)
        except Exception as error:
            return Settled(error)
        return DONE


class ThreadMover:
    """Packs on one background thread, in the order asked for; everything else in the caller's thread."""

    def __init__(self, storage: StateStorage) -> None:
        self.copy = storage.copy
        self.load = storage.load
        self.clear = storage.clear
        self._storage = storage
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dasc-pack")

    def pack(self, native_slot: int, compressed_slot: int) -> Ticket:
        """Queue a pack.

        Raises:
            RuntimeError: after ``close``.
        """
        return self._executor.submit(self._run, native_slot, compressed_slot)

    def _run(self, native_slot: int, compressed_slot: int) -> None:
        try:
            self._storage.pack(native_slot, compressed_slot)
        except Exception:
            raise
        except BaseException as error:  # a worker told to exit must not take the scheduler along
            raise TransferError(f"the pack worker stopped: {error!r}") from error

    def close(self) -> None:
        """Cancel packs not yet begun (their tickets fail), wait for the running one, end the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)
