"""One budget for recurrent state: what a dense server would have, divided into native and compressed slots (C.1)."""

from __future__ import annotations

from dataclasses import dataclass

from dasc.accounting import MemorySplit, split_budget
from dasc.sglang.config import PoolSize
from dasc.units import format_bytes

SPARE_SLOTS = 2
"""Native slots beyond those of running requests: one while a tracked state is handed over, one in hand."""


@dataclass(frozen=True)
class NativeDemand:
    """What running requests take of the native pool.

    Attributes:
        requests: that the dense server would run at once.
        slots_per_request: native slots of one running request, state and tracking.
    """

    requests: int
    slots_per_request: int

    def slots(self, requests: int) -> int:
        """Native slots with which ``requests`` run and none ever lacks one."""
        return requests * self.slots_per_request + SPARE_SLOTS

    def running_limit(self, native_slots: int) -> int:
        """Requests that ``native_slots`` can run."""
        return max(native_slots - SPARE_SLOTS, 0) // self.slots_per_request


@dataclass(frozen=True)
class StateBudget:
    """The division of one rank's state memory, and the dense arm it is measured by.

    Attributes:
        dense_slots: usable slots that the dense server would have.
        dense_slot_bytes: of one.
        compressed_slot_bytes: of a compressed slot on the fullest rank, which all ranks allot.
        running_limit: requests that may run at once.
        split: the division.
    """

    dense_slots: int
    dense_slot_bytes: int
    compressed_slot_bytes: int
    running_limit: int
    split: MemorySplit

    def table(self) -> str:
        """What each arm gets, for the log."""
        split = self.split
        rows = [
            ("", "slots", "a slot", "in all"),
            self._row("dense alone", self.dense_slots, self.dense_slot_bytes, split.budget_bytes - split.tmp_bytes),
            self._row("native", split.native_slots, self.dense_slot_bytes, split.native_bytes),
            self._row("compressed", split.compressed_slots, self.compressed_slot_bytes, split.compressed_bytes),
            ("temporary", "", "", format_bytes(split.tmp_bytes)),
            ("unused", "", "", format_bytes(split.unused_bytes)),
        ]
        lines = [f"{name:<12}{slots:>9}{slot:>13}{total:>13}" for name, slots, slot, total in rows]
        return "\n".join(["state memory of this rank, reserved slots counted in the bytes:", *lines])

    @staticmethod
    def _row(name: str, slots: int, slot_bytes: int, total_bytes: int) -> tuple[str, str, str, str]:
        return name, f"{slots:,}", format_bytes(slot_bytes), format_bytes(total_bytes)


def divide(
    pool: PoolSize,
    demand: NativeDemand,
    *,
    dense_slots: int,
    dense_slot_bytes: int,
    compressed_slot_bytes: int,
    tmp_bytes: int = 0,
) -> StateBudget:
    """Carve the compressed pool out of the dense server's native pool.

    ``auto`` gives the running requests their native slots and the compressed pool the rest. A given size of the
    compressed pool leaves the rest native, and so may lower the number of running requests.

    Args:
        dense_slots: usable slots of the dense server; its pool has one more.
        tmp_bytes: buffers of stores and loads that the dense server does not have.

    Raises:
        ValueError: when the budget cannot hold it, saying what would fit.
    """
    budget = (dense_slots + 1) * dense_slot_bytes
    least = demand.slots(1)
    room = budget - tmp_bytes - (least + 1) * dense_slot_bytes
    most = room // compressed_slot_bytes - 1
    if most < 1:
        raise ValueError(
            f"state memory of {format_bytes(budget)} ({dense_slots} dense slots) has no room for a compressed pool: "
            f"one running request takes {least} native slots; raise --max-mamba-cache-size or --mamba-full-memory-ratio"
        )
    if pool.slots is None and pool.pool_bytes is None:
        native = min(
            demand.slots(demand.requests), (budget - tmp_bytes - 2 * compressed_slot_bytes) // dense_slot_bytes - 1
        )
        split = split_budget(
            budget,
            dense_slot_bytes=dense_slot_bytes,
            compressed_slot_bytes=compressed_slot_bytes,
            native_slots=native,
            tmp_bytes=tmp_bytes,
        )
    else:
        slots = pool.slots if pool.slots is not None else (pool.pool_bytes or 0) // compressed_slot_bytes - 1
        if not 1 <= slots <= most:
            raise ValueError(
                f"DASC_POOL must be from 1 to {most} slots ({format_bytes(2 * compressed_slot_bytes)} to "
                f"{format_bytes((most + 1) * compressed_slot_bytes)}), got {pool}"
            )
        split = _with_slots(slots, budget, dense_slot_bytes, compressed_slot_bytes, tmp_bytes)
    return StateBudget(
        dense_slots=dense_slots,
        dense_slot_bytes=dense_slot_bytes,
        compressed_slot_bytes=compressed_slot_bytes,
        running_limit=min(demand.requests, demand.running_limit(split.native_slots)),
        split=split,
    )


def _with_slots(slots: int, budget: int, dense: int, compressed: int, tmp: int) -> MemorySplit:
    """Exactly ``slots`` compressed slots; whole native slots take what is left."""
    compressed_bytes = (slots + 1) * compressed
    native_pool = (budget - tmp - compressed_bytes) // dense
    return MemorySplit(
        budget_bytes=budget,
        native_slots=native_pool - 1,
        native_bytes=native_pool * dense,
        compressed_slots=slots,
        compressed_bytes=compressed_bytes,
        tmp_bytes=tmp,
        unused_bytes=budget - tmp - compressed_bytes - native_pool * dense,
    )
